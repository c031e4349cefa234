"""How strictly workers wait for each other: two policies, chosen in one place.

The *gate* says when a worker may go on (when its pull is answered). *Combine* says how contributions become a version.
Synchronous training is ``PerStep`` without a gate: only a new version lets a worker go on. Asynchronous training is
``Bounded`` (stale synchronous parallel) with ``PerContribution``.

A shard asks its policies, and asks which mode it is only where the mode changes. The processes around a shard ask
`Consistency.mode`, since they name work, hand out slices and save checkpoints differently in each mode.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from paramserver.core.versions.counted import Counted
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.versions.reduction import Reducer, is_node


class Mode(enum.Enum):
    """The value of ``[consistency] mode``."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Consistency:
    """The setting in force from a version on.

    ``staleness``: asynchronous mode only, the largest clock difference; ``None`` is unbounded. ``revision`` rises with
    every change; ``from_version`` is the version at whose publication the setting takes effect.
    """

    mode: Mode
    staleness: int | None = None
    revision: int = 0
    from_version: int = 0

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness must be 0 or more, or unbounded, not {self.staleness}")

    def __str__(self) -> str:
        if self.mode is Mode.SYNC:
            return "sync"
        return f"async with staleness {'unbounded' if self.staleness is None else self.staleness}"

    def same_as(self, other: Consistency) -> bool:
        """Whether both mean the same, from whichever version on."""
        return (self.mode, self.staleness) == (other.mode, other.staleness)


class Verdict(enum.Enum):
    """The decision about a contribution that has arrived."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    # The same work is accepted, but in no version yet: a repeated push waits together with the first one.
    QUEUED = "queued"
    OUT_OF_ORDER = "out of order"
    STALE = "stale"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class Offer:
    """The verdict on one contribution.

    ``dropped``: buffers that nobody needs any more. ``first``: if it is queued, the buffer that came first.
    """

    verdict: Verdict
    reason: str = ""
    dropped: tuple[int, ...] = ()
    first: int = 0


_ACCEPTED, _DUPLICATE = Offer(Verdict.ACCEPTED), Offer(Verdict.DUPLICATE)


@dataclass(frozen=True, slots=True)
class Batch:
    """The contributions that make the next version, in the order in which they are combined."""

    names: tuple[Name, ...]
    buffers: tuple[int, ...]

    @property
    def slices(self) -> int:
        """How many slices they cover."""
        return sum(name.slices for name in self.names)


@dataclass(frozen=True, slots=True)
class Missing:
    """Slices that step ``step`` lacks, as half-open ranges of its ``of`` slices; ``of`` 0: it has not begun."""

    step: int
    slices: tuple[tuple[int, int], ...]
    of: int

    def __str__(self) -> str:
        if not self.of:
            return f"step {self.step}: all slices"
        if not self.slices:
            return f"step {self.step}: all of its {self.of} slices are here"
        gaps = [str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}" for lo, hi in self.slices]
        return f"step {self.step}: slices {', '.join(gaps)} of {self.of}"


class Combine(Protocol):
    """Says how contributions become a version.

    ``per_step``: a version is a whole step, and a contribution is answered when it is taken. Otherwise a version is one
    contribution, which is answered when the version is there.
    """

    per_step: ClassVar[bool]

    def offer(self, name: Name, buffer: int) -> Offer:
        """Take or refuse a contribution, whose bytes the shell keeps as ``buffer``."""

    def take(self, only: Collection[Name] | None = None) -> Batch | None:
        """The contributions of the next version, once they are there; at most one batch is out at a time.

        ``only``: asynchronous mode, while a cut is made for readers: none but these.
        """

    def built(self) -> None:
        """The batch that was taken has become a version."""

    def followed(self, names: Collection[Name]) -> None:
        """A backup: these contributions, which another server has taken, have become a version."""

    def missing(self) -> Missing | None:
        """The slices that the next version lacks; None if it needs no particular ones."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Bounded staleness: nobody is more than ``staleness`` slices ahead of the slowest (``None``: unbounded)."""

    staleness: int | None

    def admits(self, clock: int, slowest: int) -> bool:
        """Whether a worker that has finished ``clock`` slices may begin the next. ``slowest``: the slowest clock."""
        return self.staleness is None or clock - slowest <= self.staleness


@dataclass(slots=True)
class History:
    """The contributions counted so far; successive policies share them, so that no mode change forgets them."""

    version: int = 0
    # Synchronous steps below this number are published.
    steps_done: int = 0
    # Asynchronous slices that are in a published version.
    slices_done: Counted = field(default_factory=Counted)

    def has(self, name: Name) -> bool:
        """True if the work of this name has been counted in a published version."""
        if isinstance(name, SyncName):
            return name.step < self.steps_done
        return self.slices_done.has(name.epoch, name.index)


class PerStep:
    """Synchronous: a version is made of all slices of its step, combined in the fixed tree over slice indices."""

    per_step: ClassVar[bool] = True

    def __init__(self, history: History) -> None:
        self._history = history
        self._reducer: Reducer | None = None
        self._of = 0
        self._buffers: dict[tuple[int, int], int] = {}
        self._taken = False
        history.steps_done = history.version

    def offer(self, name: Name, buffer: int) -> Offer:
        """Accept each slice of the open step once; a larger node replaces the smaller ones that it contains."""
        if self._history.has(name):
            return _DUPLICATE
        if isinstance(name, AsyncName):
            return Offer(Verdict.STALE, f"the job is synchronous now, but {name} is an asynchronous contribution")
        if name.step > self._history.version:
            return Offer(
                Verdict.OUT_OF_ORDER,
                f"{name} arrived, but this shard still works on step {self._history.version}",
            )
        if not is_node(name.lo, name.hi, name.of):
            return Offer(
                Verdict.MALFORMED, f"[{name.lo}, {name.hi}) of {name.of} slices is no node of the reduction tree"
            )
        if self._reducer is None:
            self._reducer, self._of = Reducer(name.of), name.of
        if name.of != self._of:
            return Offer(Verdict.MALFORMED, f"{name} says the step has {name.of} slices, earlier ones said {self._of}")
        if self._taken:
            return _DUPLICATE
        contained = self._reducer.add((name.lo, name.hi))
        if contained is None:
            return _DUPLICATE
        dropped = tuple(self._buffers.pop(node) for node in contained)
        self._buffers[(name.lo, name.hi)] = buffer
        return Offer(Verdict.ACCEPTED, dropped=dropped) if dropped else _ACCEPTED

    def take(self, only: Collection[Name] | None = None) -> Batch | None:
        """All slices of the step, by slice index, once none is missing. Every version is a cut."""
        if self._taken or self._reducer is None or not self._reducer.complete:
            return None
        self._taken = True
        nodes = sorted(self._buffers)
        step = self._history.version
        return Batch(
            tuple(SyncName(step, lo, hi, self._of) for lo, hi in nodes), tuple(self._buffers[node] for node in nodes)
        )

    def built(self) -> None:
        """The step is published: it answers for its slices from now on."""
        self._history.steps_done = self._history.version
        self._reducer, self._of, self._taken = None, 0, False
        self._buffers.clear()

    def followed(self, names: Collection[Name]) -> None:
        """The step is published."""
        self.built()

    def missing(self) -> Missing | None:
        """The slices that the open step lacks."""
        if self._taken:
            return None
        gaps = self._reducer.missing if self._reducer is not None else ()
        return Missing(self._history.version, gaps, self._of)


class PerContribution:
    """Asynchronous: every contribution is a version of its own, in order of arrival."""

    per_step: ClassVar[bool] = False

    def __init__(self, history: History) -> None:
        self._history = history
        self._queue: dict[AsyncName, int] = {}  # in order of arrival
        self._taken: AsyncName | None = None

    def offer(self, name: Name, buffer: int) -> Offer:
        """Accept each slice once, from any worker."""
        if self._history.has(name):
            return _DUPLICATE
        if isinstance(name, SyncName):
            return Offer(Verdict.STALE, f"the job is asynchronous now, but {name} is a synchronous contribution")
        first = self._queue.setdefault(name, buffer)
        return _ACCEPTED if first == buffer else Offer(Verdict.QUEUED, first=first)

    def take(self, only: Collection[Name] | None = None) -> Batch | None:
        """The oldest contribution that is not applied yet, of those that may be now."""
        if self._taken is not None:
            return None
        for name, buffer in self._queue.items():
            if only is None or name in only:
                self._taken = name
                return Batch((name,), (buffer,))
        return None

    def built(self) -> None:
        """The contribution is applied, and from now on a duplicate."""
        name, self._taken = self._taken, None
        assert name is not None, "what was built was taken before"
        del self._queue[name]
        self.followed([name])

    def followed(self, names: Collection[Name]) -> None:
        """The contributions are applied, and from now on duplicates."""
        for name in names:
            if isinstance(name, AsyncName):
                self._history.slices_done.add(name.epoch, name.index)

    def missing(self) -> Missing | None:
        """Nothing: every request is served."""
        return None


class Policies:
    """The setting in force, its gate (None: synchronous), and its way to combine. ``history`` outlives changes."""

    def __init__(self, consistency: Consistency, history: History) -> None:
        self._history = history
        # No worker may pass the gate for now.
        self.held_back = False
        self.begin(consistency)

    def begin(self, consistency: Consistency) -> None:
        """Take a setting into force with nothing queued."""
        self.consistency = consistency
        self.gate: Bounded | None
        self.combine: Combine
        if consistency.mode is Mode.SYNC:
            self.gate, self.combine = None, PerStep(self._history)
        else:
            self.gate, self.combine = Bounded(consistency.staleness), PerContribution(self._history)

    def change(self, consistency: Consistency) -> bool:
        """Take a setting into force; False if only the bound is another one, and queued contributions stay queued."""
        if consistency.mode is not self.consistency.mode:
            self.begin(consistency)
            return True
        self.consistency = consistency
        self.gate = Bounded(consistency.staleness) if self.gate is not None else None
        return False
