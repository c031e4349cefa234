"""Work stealing in synchronous mode: which slice of the open step an idle worker should compute.

Each step's slices are dealt out in contiguous ranges. A worker says how fast it is when it pulls a version; then it
asks for work only if it is idle, or if others may have taken slices of its range. The answer is advice: shards count
contributions by their names, so a slice that two workers compute costs time and nothing else.

For every slice that has not arrived there is a guess when it will be finished: by the workers that attempt it, or by
its owner, which goes through its range in order. A worker that asks is given the slice that would come last, if this
worker would finish that slice earlier. That is work stealing if no worker has begun the slice, and speculative
execution if another worker computes it already. The worker's own range comes first, from its near end. Times are
arguments, in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from paramserver.core.versions.consistency import Missing
from paramserver.core.work.slices import assign
from paramserver.core.work.speed import longest_patience_s

Range = tuple[int, int]
# A thief must be faster than the worker that has a slice by this factor, so that chance alone does not double work.
_MARGIN = 1.25
# Workers that ask in a step, and attempts that are noted. A worker beyond them waits, and asks again.
_WORKERS, _ATTEMPTS = 4096, 1 << 18


@dataclass(frozen=True, slots=True)
class Assignment:
    """The ``place`` of a worker among the ``workers`` that get slices (-1: it gets none), and its time per slice.

    ``work_s``: seconds from the beginning of a slice to the end of its push; 0: not known.
    """

    worker: int
    place: int
    workers: int
    work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker has time for a slice of step ``step``, which has ``of`` slices.

    ``finished``: the slices of this step that the worker has computed, which have arrived or are on their way.
    """

    assignment: Assignment
    step: int
    of: int
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer to a worker that asks. ``slice``: compute this one; None: wait, and ask again later.

    ``complete``: the shard lacks nothing of the step.
    """

    slice: int | None
    complete: bool


@dataclass(frozen=True, slots=True)
class _Attempt:
    at: float
    work_s: float

    def left_s(self, now: float) -> float:
        """How many seconds the attempt may still take. A late attempt is expected to take its delay once more."""
        return abs(self.at + self.work_s - now)

    def overdue(self, now: float) -> bool:
        """True if the attempt takes twice as long as it should have: perhaps its result never arrives."""
        return now - self.at > 2 * self.work_s


@dataclass(slots=True)
class _Step:
    """Attempts and requests of one step."""

    number: int
    began_at: float
    # By slice and worker: when the computation began.
    attempts: dict[int, dict[int, _Attempt]] = field(default_factory=dict)
    # Workers that have asked for work, and when they last did.
    asked: dict[int, float] = field(default_factory=dict)
    # Slices that were given to others than their owners.
    taken: set[int] = field(default_factory=set)
    # How many attempts were noted.
    noted: int = 0

    def note(self, slice_: int, worker: int, attempt: _Attempt) -> None:
        """A worker computes a slice, or has computed it."""
        attempts = self.attempts.setdefault(slice_, {})
        self.noted += worker not in attempts
        attempts[worker] = attempt


class Stealing:
    """The attempts and assignments known to one shard, which decides for all shards; see the head of this file."""

    def __init__(self) -> None:
        self._open = _Step(-1, 0.0)
        self._taken_before: tuple[int, ...] = ()
        # By place: the worker that owns the range, and the version that the worker was given last.
        self._owners: dict[int, tuple[Assignment, int]] = {}

    def begin(self, step: int, now: float) -> None:
        """Step ``step`` begins, and the previous step is over."""
        self._taken_before = tuple(sorted(self._open.taken)) if self._open.number == step - 1 else ()
        self._open = _Step(step, now)

    def keep(self, workers: Iterable[int]) -> None:
        """Forget the attempts of all workers but these: the others are gone."""
        present = frozenset(workers)
        self._owners = {place: known for place, known in self._owners.items() if known[0].worker in present}
        for slice_, attempts in list(self._open.attempts.items()):
            self._open.attempts[slice_] = {worker: attempt for worker, attempt in attempts.items() if worker in present}
        self._open.noted = sum(map(len, self._open.attempts.values()))

    def taken(self, version: int) -> tuple[int, ...]:
        """Slices of the step that made ``version`` which were given to others than their owners."""
        return self._taken_before if version == self._open.number else ()

    def given(self, assignment: Assignment, version: int) -> None:
        """A worker is given ``version``, and begins with its range of that step."""
        if any(known.workers != assignment.workers for known, _ in self._owners.values()):
            self._owners.clear()  # the slices are dealt out anew
        if assignment.place >= 0:
            self._owners[assignment.place] = (assignment, version)

    def advise(self, ask: Ask, version: int, missing: Missing | None, now: float) -> Advice:
        """The answer of a shard whose newest version is ``version``. ``missing``: the slices that its step lacks."""
        if ask.step != version or missing is None:
            return Advice(None, complete=ask.step <= version)
        return Advice(self.ask(ask, missing.slices if missing.of else ((0, ask.of),), now), complete=False)

    def ask(self, ask: Ask, missing: Sequence[Range], now: float) -> int | None:
        """The slice to compute now; None: wait, and ask again. ``missing``: slices that have not arrived, sorted."""
        if ask.step != self._open.number:
            self._open, self._taken_before = _Step(ask.step, now), ()
        step, worker = self._open, ask.assignment.worker
        if step.noted + len(ask.finished) > _ATTEMPTS or (worker not in step.asked and len(step.asked) >= _WORKERS):
            return None
        self.given(ask.assignment, ask.step)
        step.asked[worker] = now
        work_s = ask.assignment.work_s or self._fastest(inf)
        if work_s == inf:
            work_s = 1.0
        for slice_, attempts in step.attempts.items():
            # A worker computes one slice at a time: its earlier slice is finished, or the answer got lost.
            if slice_ not in ask.finished:
                step.noted -= attempts.pop(worker, None) is not None
        for slice_ in ask.finished:
            step.note(slice_, worker, _Attempt(now - work_s, work_s))
        open_ = [s for lo, hi in missing for s in range(lo, hi) if s not in ask.finished]
        ranges = assign(ask.of, ask.assignment.workers)
        own = ranges[ask.assignment.place] if ask.assignment.place >= 0 else (0, 0)
        free = [s for s in open_ if own[0] <= s < own[1] and not step.attempts.get(s)]
        chosen = free[0] if free and now + work_s <= self._by_others(worker, work_s, ranges, len(free), now) else None
        if chosen is None:
            chosen = self._others(worker, work_s, ranges, [s for s in open_ if s not in free], now)
        if chosen is not None:
            step.note(chosen, worker, _Attempt(now, work_s))
            if not own[0] <= chosen < own[1]:
                step.taken.add(chosen)
        return chosen

    def _by_others(self, worker: int, work_s: float, ranges: Sequence[Range], slices: int, now: float) -> float:
        """When the other workers would have computed so many ``slices``, after those that they have to do first."""
        ready: list[tuple[float, float]] = []  # when each would have done one more, and how long each takes
        for place, (owner, version) in self._owners.items():
            if owner.worker == worker or version != self._open.number:
                continue
            speed = owner.work_s or work_s
            mine = [c[owner.worker] for c in self._open.attempts.values() if owner.worker in c]
            if owner.worker in self._open.asked:
                running = [attempt for attempt in mine if attempt.at + attempt.work_s > now]
                if not running and now - self._open.asked[owner.worker] > 2 * longest_patience_s(speed):
                    continue  # it asks no more: it hangs, or another server keeps it waiting
                left_s = max((attempt.left_s(now) for attempt in running), default=0.0)
            else:
                lo, hi = ranges[place]
                left_s = abs(self._open.began_at + speed * (hi - lo) - now)
            heapq.heappush(ready, (now + left_s + speed, speed))
        through = inf
        for _ in range(slices if ready else 0):
            through, speed = ready[0]
            heapq.heapreplace(ready, (through + speed, speed))
        return through

    def _fastest(self, work_s: float) -> float:
        return min([work_s, *(known.work_s or work_s for known, _ in self._owners.values())])

    def _others(
        self, worker: int, work_s: float, ranges: Sequence[Range], open_: Sequence[int], now: float
    ) -> int | None:
        """The slice that would come last, if this worker would be faster; of equal ones, the highest slice."""
        best, longest = None, work_s * _MARGIN
        for place, range_ in enumerate(ranges):
            inside = [s for s in open_ if range_[0] <= s < range_[1]]
            if not inside:
                continue
            owner = self._owners[place][0].worker if place in self._owners else 0
            for slice_, by_owner_s in zip(inside, self._owner(place, range_, inside, work_s, now), strict=True):
                attempts = self._open.attempts.get(slice_, {})
                helpers = [attempt for who, attempt in attempts.items() if who != owner]
                if worker in attempts or not all(attempt.overdue(now) for attempt in helpers):
                    continue
                left_s = min((by_owner_s, *(attempt.left_s(now) for attempt in attempts.values())))
                if left_s >= longest:
                    best, longest = slice_, left_s
        return best

    def _owner(self, place: int, range_: Range, inside: Sequence[int], work_s: float, now: float) -> list[float]:
        """For each of these slices of a range, in how many seconds its owner is expected to have done it."""
        speed, attempts = self._fastest(work_s), self._open.attempts
        if place in self._owners:
            owner, version = self._owners[place]
            speed = owner.work_s or speed
            at_it = [attempts[s][owner.worker].left_s(now) for s in inside if owner.worker in attempts.get(s, {})]
            if version != self._open.number or (owner.worker in self._open.asked and not at_it):
                return [inf] * len(inside)  # it is still at an earlier step, or waits
            if at_it:
                free = [s for s in inside if not attempts.get(s)]
                return [max(at_it) + speed * (free.index(s) + 1) if s in free else inf for s in inside]
        # The owner may hold its contributions back until its range is complete.
        return [abs(self._open.began_at + speed * (range_[1] - range_[0]) - now)] * len(inside)
