"""The values that scripts log become one value per name and step, the same for any workers of its slices.

Rules: the last value of a name in a slice counts; the value of a step is the mean over its slices, weighted by samples.
A value from outside of slices counts with weight 1 for its worker. A step is *closed* when no worker can add to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Where a worker stands, or a value belongs: timeline and step.
Place = tuple[int, int]
# The slice (epoch, index) or the worker that a value is of.
Source = tuple[int, int] | str

# So many closed steps are remembered, and so many names of values in all of them, to tell late values from new ones.
REMEMBERED, _NAMES_REMEMBERED = 1024, 1 << 18
# Names of a job and of one worker, and characters of these names. Values of further names are left out.
NAMES, NAMES_OF_ONE, NAME_CHARS, NAME_CHARS_OF_ONE = 4000, 1000, 1 << 18, 1 << 16
# Values of all open steps. Further values are left out, until steps are closed.
VALUES = 1 << 18
# Processes of which it is known which calls were heard.
_PROCESSES = 1 << 14


@dataclass(frozen=True, slots=True)
class Logged:
    """The values of one call of ``ctx.log``. ``slice``: epoch and index; None: the script had no slice."""

    step: int
    timeline: int
    values: Mapping[str, float]
    slice: tuple[int, int] | None = None
    samples: int = 1


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values of a closed step. ``epoch``: the epoch of its slices; None: not known."""

    step: int
    timeline: int
    values: Mapping[str, float]
    epoch: int | None = None

    @property
    def place(self) -> Place:
        """Timeline and step."""
        return self.timeline, self.step


@dataclass(slots=True)
class _Open:
    timeline: int
    # When the first value came (seconds).
    since: float
    epoch: int | None = None
    # Name to source to (samples, value).
    values: dict[str, dict[Source, tuple[int, float]]] = field(default_factory=dict)
    count: int = 0


class _Names:
    """The names of values that a job has, each with the worker that has brought it first."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._of: dict[str, tuple[int, int]] = {}
        self._chars = 0

    def take(self, name: str, worker: str) -> str | None:
        """The name as it is kept once for all values; None if there is no room for it."""
        if name in self._known:
            return self._known[name]
        count, chars = self._of.get(worker, (0, 0))
        one, all_ = count < NAMES_OF_ONE and chars + len(name) <= NAME_CHARS_OF_ONE, self._chars + len(name)
        if not one or len(self._known) >= NAMES or all_ > NAME_CHARS:
            return None
        self._known[name], self._of[worker], self._chars = name, (count + 1, chars + len(name)), all_
        return name


class Collector:
    """Collects what workers have logged, and closes steps. Times are seconds of one clock.

    ``patience_s``: a step is closed at the latest so long after its first value came.
    """

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._open: dict[int, _Open] = {}
        # Closed steps with the names of their values, in the order in which they were closed.
        self._closed: OrderedDict[Place, set[str]] = OrderedDict()
        # How many names these are; the newest of the steps that are forgotten; how many values open steps have.
        self._remembered, self._forgotten, self._values = 0, (-1, -1), 0
        self._names = _Names()
        # The name of the first value for which there was no room; empty: there was room for all.
        self.refused = ""
        # The newest step that was closed, and the newest one that an earlier coordinator has closed.
        self._newest: Place = (0, -1)
        self._taken_over: Place = (0, -1)
        # The newest timeline of a value, and its lowest step: older values of this step and later ones are void.
        self._timeline, self._base = 0, 0
        # By process, the number of the next call of `ctx.log`; earlier ones were heard.
        self._next: OrderedDict[int, int] = OrderedDict()

    def go_on(self, steps: Iterable[StepValues]) -> None:
        """An earlier coordinator of the job has closed these steps, oldest first: none of them is closed again."""
        for step in steps:
            self._note(step)
            self._on_timeline(step.timeline, step.step)
        self._taken_over = self._newest

    def hear(
        self, process: int, worker: str, first: int, calls: Sequence[Logged], now: float, late_counts: bool
    ) -> None:
        """A worker has logged ``calls``, the first of which has the number ``first`` in its process.

        ``late_counts``: a late value of a slice is another update (asynchronous mode), and counts for the next step.
        Otherwise the slice has been computed twice.
        """
        known = self._next.get(process, 0)
        self._next[process] = max(known, first + len(calls))
        self._next.move_to_end(process)
        while len(self._next) > _PROCESSES:
            self._next.popitem(last=False)
        for call in calls[max(0, known - first) :]:
            if not self._on_timeline(call.timeline, call.step):
                continue
            for given, value in call.values.items():
                name = self._names.take(given, worker)
                if name is None:
                    self.refused = self.refused or given
                    continue
                step = self._step_of(call, name, late_counts)
                if step is not None:
                    self._add(step, call, worker, name, value, now)

    def _on_timeline(self, timeline: int, step: int) -> bool:
        """Whether a value of this place is of the job's history. A newer timeline makes later steps void."""
        if timeline < self._timeline:
            return step < self._base
        if timeline > self._timeline:
            self._timeline, self._base = timeline, step
        elif step < self._base:
            self._base = step
        else:
            return True
        for old in [s for s, opened in self._open.items() if s >= step and opened.timeline < timeline]:
            self._values -= self._open.pop(old).count
        return True

    def _step_of(self, call: Logged, name: str, late_counts: bool) -> int | None:
        """The step for which a value counts; None: the value has counted."""
        place = (call.timeline, call.step)
        names = self._closed.get(place)
        forgotten = names is None and place <= self._forgotten
        if not forgotten and (names is None or name not in names):
            return call.step
        if place <= self._taken_over or (call.slice is not None and not late_counts):
            return None
        return self._newest[1] + 1 if call.timeline == self._newest[0] else None

    def _add(self, step: int, call: Logged, worker: str, name: str, value: float, now: float) -> None:
        if self._values >= VALUES:
            self.refused = self.refused or name
            return
        opened = self._open.get(step)
        if opened is None:
            opened = self._open[step] = _Open(call.timeline, now)
        opened.timeline = max(opened.timeline, call.timeline)
        source: Source = worker if call.slice is None else call.slice
        if call.slice is not None:
            opened.epoch = call.slice[0]
        values = opened.values.setdefault(name, {})
        opened.count, self._values = opened.count + (source not in values), self._values + (source not in values)
        values[source] = (call.samples, value)

    def close(self, workers: Iterable[Place], now: float) -> list[StepValues]:
        """The steps that are closed now, in their order. ``workers``: where each present worker stands.

        A worker that stands at a step logs nothing for earlier steps any more.
        """
        lowest = min(workers, default=None)
        closed = []
        for step, opened in sorted(self._open.items()):
            passed = lowest is None or (opened.timeline, step) < lowest
            if passed or now - opened.since >= self._patience_s:
                del self._open[step]
                self._values -= opened.count
                values = {name: _mean(given) for name, given in opened.values.items()}
                closed.append(StepValues(step, opened.timeline, values, opened.epoch))
                self._note(closed[-1])
        return closed

    def _note(self, step: StepValues) -> None:
        names = self._closed.setdefault(step.place, set())
        self._remembered += len(step.values.keys() - names)
        names.update(step.values)
        self._newest = max(self._newest, step.place)
        while len(self._closed) > REMEMBERED or (len(self._closed) > 1 and self._remembered > _NAMES_REMEMBERED):
            place, names = self._closed.popitem(last=False)
            self._remembered -= len(names)
            self._forgotten = max(self._forgotten, place)


def _mean(given: Mapping[Source, tuple[int, float]]) -> float:
    """The mean weighted by samples, added up in one order, so that equal values give equal bits."""
    ordered = [given[source] for source in sorted(given, key=lambda s: (isinstance(s, str), s))]
    if len(ordered) == 1:
        return ordered[0][1]
    samples = sum(weight for weight, _ in ordered)
    if samples == 0:
        return sum(value for _, value in ordered) / len(ordered)
    return sum(weight * value for weight, value in ordered if weight) / samples
