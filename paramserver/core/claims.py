"""Synchronous mode: which slice of the open step a worker that has time should compute.

Each step's slices are dealt out in contiguous ranges. A worker that keeps up says nothing and is not in here; one that
is idle, or knows that it is slow, asks. What it hears is advice: the name of a slice decides what counts, so a slice
that two compute costs time and nothing else.

For every slice that has not arrived there is a guess when it will be finished: by those who have claimed it, or by its
owner, who goes through its range in order. Who asks is given the slice that everybody would wait for longest, if it is
faster than that; its own range comes first, from its near end. Times are arguments, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from paramserver.core.slices import assign

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker has time for a slice of step ``step``, which has ``of`` slices and ``workers`` owners.

    ``own``: the range dealt to it. ``work_s``: how long a slice usually takes it, until it is pushed (0: no idea).
    ``finished``: what it has computed of this step, which is here or on its way.
    """

    worker: int
    step: int
    of: int
    own: Range
    workers: int
    work_s: float = 0.0
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Claim:
    at: float
    work_s: float

    def left_s(self, now: float) -> float:
        """How long it may still take; who is late by some time is given as much again."""
        return abs(self.at + self.work_s - now)

    def overdue(self, now: float) -> bool:
        """It takes twice as long as it should have: perhaps it never comes."""
        return now - self.at > 2 * self.work_s


@dataclass(slots=True)
class _Step:
    """What is known of one step."""

    number: int
    began_at: float
    of: int = 0
    # By slice, who computes it since when.
    claims: dict[int, dict[int, _Claim]] = field(default_factory=dict)
    # Ranges whose owners have asked: the worker, and its time per slice.
    owners: dict[Range, tuple[int, float]] = field(default_factory=dict)
    # Slices that were given to others than their owners.
    taken: set[int] = field(default_factory=set)
    speeds: dict[int, float] = field(default_factory=dict)


class Claims:
    """The claims of one shard, which speaks for all; see the head of this file."""

    def __init__(self) -> None:
        self._open = _Step(-1, 0.0)
        self._before = _Step(-1, 0.0)
        # How long a slice of the step before took the job: the whole step, divided by its slices.
        self._pace_s = 0.0

    def begin(self, step: int, now: float, of: int = 0) -> None:
        """Step ``step`` begins; the one before, if it was watched, is over and had ``of`` slices."""
        followed = self._open.number == step - 1 and of > 0
        self._pace_s = (now - self._open.began_at) / of if followed else 0.0
        self._before = self._open if followed else _Step(-1, now)
        self._open = _Step(step, now)

    def keep(self, workers: Iterable[int]) -> None:
        """Forget what was claimed by others than these: they are gone."""
        present = frozenset(workers)
        for slice_, claims in list(self._open.claims.items()):
            self._open.claims[slice_] = {worker: claim for worker, claim in claims.items() if worker in present}

    def taken(self, version: int) -> tuple[int, ...]:
        """Slices of the step that made ``version`` which were given to others than their owners."""
        return tuple(sorted(self._before.taken)) if version == self._before.number + 1 else ()

    def ask(self, ask: Ask, missing: Sequence[Range], now: float) -> int | None:
        """The slice to compute now; None: wait, and ask again later. ``missing``: what has not arrived, sorted."""
        if ask.step != self._open.number:
            self._open = _Step(ask.step, now)
            self._before, self._pace_s = _Step(-1, now), 0.0
        step = self._open
        step.of = ask.of
        work_s = ask.work_s or self._pace_s * ask.of or 1.0
        step.speeds[ask.worker] = work_s
        if ask.own[0] < ask.own[1]:
            step.owners[ask.own] = (ask.worker, work_s)
        for slice_, claims in step.claims.items():
            # It computes one slice at a time: an answer that it asks beyond has got lost, or is finished.
            if slice_ not in ask.finished:
                claims.pop(ask.worker, None)
        for slice_ in ask.finished:
            step.claims.setdefault(slice_, {})[ask.worker] = _Claim(now - work_s, work_s)
        open_ = [s for lo, hi in missing for s in range(lo, hi) if s not in ask.finished]
        if not open_ or self._too_slow(work_s, now):
            return None
        chosen = self._own(ask, open_)
        if chosen is None:
            chosen = self._others(ask, open_, work_s, now)
        if chosen is not None:
            step.claims.setdefault(chosen, {})[ask.worker] = _Claim(now, work_s)
            if not ask.own[0] <= chosen < ask.own[1]:
                step.taken.add(chosen)
        return chosen

    def _too_slow(self, work_s: float, now: float) -> bool:
        """Others will be through before it would be, if the step takes about as long as the one before."""
        usual_s, passed_s = self._pace_s * self._open.of, now - self._open.began_at
        return passed_s < usual_s < passed_s + work_s - self._fastest() / 2

    def _fastest(self) -> float:
        return min((*self._open.speeds.values(), *self._before.speeds.values()))

    def _own(self, ask: Ask, open_: Sequence[int]) -> int | None:
        return next((s for s in open_ if ask.own[0] <= s < ask.own[1] and not self._open.claims.get(s)), None)

    def _others(self, ask: Ask, open_: Sequence[int], work_s: float, now: float) -> int | None:
        """The slice that would come last, if this worker would bring it earlier; of equals, the one farthest back."""
        best, longest = None, work_s
        for range_ in assign(ask.of, ask.workers):
            inside = [s for s in open_ if range_[0] <= s < range_[1]]
            if not inside:
                continue
            for slice_, by_owner_s in zip(inside, self._owner(range_, inside, now), strict=True):
                claims = self._open.claims.get(slice_, {})
                helpers = [c for worker, c in claims.items() if worker != self._open.owners.get(range_, (0, 0))[0]]
                if ask.worker in claims or not all(claim.overdue(now) for claim in helpers):
                    continue
                left_s = min((by_owner_s, *(claim.left_s(now) for claim in claims.values())))
                if left_s >= longest and left_s > work_s:
                    best, longest = slice_, left_s
        return best

    def _owner(self, range_: Range, inside: Sequence[int], now: float) -> list[float]:
        """For each of these slices of a range, in how many seconds its owner is expected to have done it."""
        worker, speed = self._open.owners.get(range_, (0, 0.0))
        if worker:
            at_it = [claims[worker].left_s(now) for s in inside if worker in (claims := self._open.claims.get(s, {}))]
            if not at_it:  # it waits
                return [inf] * len(inside)
            free = [s for s in inside if not self._open.claims.get(s)]
            return [max(at_it) + speed * (free.index(s) + 1) if s in free else inf for s in inside]
        # It says nothing, and what it has may be held back until it is through with its range.
        _, speed = self._before.owners.get(range_, (0, 0.0))
        if not speed and any(s in self._before.taken for s in inside):  # nor did it when others did its work
            return [inf] * len(inside)
        if not speed:
            speed = self._fastest()
            if self._pace_s:  # it was through in time in the step before
                speed = min(speed, self._pace_s * self._open.of / (range_[1] - range_[0]))
        return [abs(self._open.began_at + speed * (range_[1] - range_[0]) - now)] * len(inside)
