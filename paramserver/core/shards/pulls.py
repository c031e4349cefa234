"""Pulls that wait at a shard, and the clocks of the workers: who may have which version now.

A clock is the number of asynchronous slices that a worker has finished. In asynchronous mode a pull at a clock waits
for the slowest worker, as the gate says. A pull of a version waits for the version, whatever the clocks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paramserver.core.shards.clocks import Clocks
from paramserver.core.shards.published import Published
from paramserver.core.versions.consistency import Policies
from paramserver.core.versions.events import (
    AnswerPull,
    AtClock,
    AtLeast,
    Effect,
    Exactly,
    Joining,
    Latest,
    PullAsked,
    Refusal,
    Refuse,
)

_AtAClock = AtClock | Joining
# So many numbers of pulls that are gone are kept at most.
_GONE = 1000
_NO_MEMBER = "this worker is no longer a member: register again"


class Pulls:
    """The members of a shard, their clocks, and the pulls that nobody has answered yet."""

    def __init__(self, workers: Iterable[int] = ()) -> None:
        # Clocks of the workers that are at work; a member that has not started, or is idle, is not among them.
        self._clocks = Clocks()
        # The slowest clock so far. It never moves back.
        self.floor = 0
        # The largest difference between the clock of a worker that passed the gate, and the slowest clock.
        self.max_spread = 0
        self._members = frozenset(workers)
        # The highest number of a worker so far. Numbers rise, so a worker with a lower one that is no member was one.
        self._newest_worker = max(self._members, default=0)
        self._parked: dict[int, PullAsked] = {}
        # Of them, those that wait for a version whatever the clocks are, and those never looked at; some may be gone.
        self._for_version: list[int] = []
        self._fresh: list[int] = []
        # When parked pulls were looked at last: the versions, and all facts on which an answer at a clock depends.
        self._seen: tuple[tuple[int, int], tuple[object, ...]] | None = None

    def __len__(self) -> int:
        """How many pulls wait."""
        return len(self._parked)

    @property
    def clocks(self) -> Mapping[int, int]:
        """Asynchronous slices that each worker at work has finished."""
        return self._clocks.of

    def slowest_workers(self) -> tuple[int, ...]:
        """The workers at the slowest clock."""
        return tuple(sorted(worker for worker, clock in self.clocks.items() if clock == self.floor))

    # ---- clocks

    def tick(self, worker: int, clock: int) -> None:
        """A slice that this worker began at ``clock`` is in a version."""
        if worker in self._clocks.of:
            self._clocks.raise_to(worker, clock + 1)

    def idle(self, worker: int) -> None:
        """This worker holds no other worker back until it pulls again."""
        self._clocks.drop(worker)

    def set_clocks(self, clocks: Mapping[int, int], floor: int = 0) -> None:
        """Clocks that another server has told, or none where the mode changes."""
        self._clocks = Clocks({worker: clock for worker, clock in clocks.items() if worker in self._members})
        self.floor = max(self.floor, floor)

    # ---- pulls

    def ask(self, pull: PullAsked, gated: bool) -> list[Effect]:
        """A pull has come: it is refused, or it waits from now on. ``gated``: whether the mode has clocks."""
        if self._given_up(pull):
            return [Refuse(pull.call, Refusal.FENCED, _NO_MEMBER)]
        self._parked[pull.call] = pull
        self._fresh.append(pull.call)
        if not isinstance(pull.want, _AtAClock):
            if len(self._for_version) > 2 * len(self._parked) + _GONE:
                self._for_version = [call for call in self._for_version if call in self._parked]
            self._for_version.append(pull.call)
        self._enter(pull, gated)
        return []

    def gone(self, call: int) -> None:
        """The caller of this pull has gone, or its wait is over."""
        self._parked.pop(call, None)

    def members_changed(self, workers: frozenset[int], gated: bool) -> list[Effect]:
        """Refuse the pulls of workers that have gone; those that have come begin at their clocks."""
        gone, new = self._members - workers, workers - self._members
        self._members = workers
        self._newest_worker = max(self._newest_worker, *workers, 0)
        effects: list[Effect] = []
        for worker in gone:
            self._clocks.drop(worker)
        for call, pull in list(self._parked.items()):
            if pull.worker in gone or self._given_up(pull):
                del self._parked[call]
                effects.append(Refuse(call, Refusal.FENCED, _NO_MEMBER))
            elif pull.worker in new:  # all of them enter before the first is let through
                self._enter(pull, gated)
        return effects

    def look_again(self) -> None:
        """The next look is at all pulls: another timeline has begun."""
        self._seen = None

    def answers(self, published: Published, policies: Policies) -> list[Effect]:
        """Move the slowest clock, and answer every pull that may be answered now.

        A shard that has published nothing answers nobody.
        """
        slowest = self._clocks.slowest
        if slowest is not None and slowest > self.floor:
            self.floor = slowest
        if not published.kept:
            self._fresh.clear()
            return []
        effects: list[Effect] = []
        for call in self._worth_a_look(published, (slowest, policies.held_back, policies.consistency, self._members)):
            pull = self._parked.get(call)
            answer = self._answer(published, policies, pull) if pull is not None else None
            if answer is not None:
                del self._parked[call]
                effects.append(answer)
        return effects

    def _given_up(self, pull: PullAsked) -> bool:
        """Its worker was a member once. Asking for a version is free to all, asking at a clock is not."""
        at_a_clock = isinstance(pull.want, _AtAClock)
        return at_a_clock and pull.worker not in self._members and pull.worker < self._newest_worker

    def _enter(self, pull: PullAsked, gated: bool) -> None:
        """A worker that pulls at a clock is at work from now on, if it is a member and the mode has clocks."""
        if not gated or pull.worker not in self._members:
            return
        match pull.want:
            case AtClock(clock):
                self._clocks.raise_to(pull.worker, max(self.floor, clock))
            case Joining():
                self._clocks.raise_to(pull.worker, self.floor)

    def _worth_a_look(self, published: Published, facts: tuple[object, ...]) -> list[int]:
        """Pulls that may be answered now and could not be before: with a thousand workers most of them wait for others.

        ``facts``: all on which an answer at a clock depends. May name a pull twice, or one that is not parked any more.
        """
        fresh, self._fresh = self._fresh, []
        versions = published.kept[-1], published.given
        seen, self._seen = self._seen, (versions, facts)
        if seen is None or seen[1] != facts:
            return list(self._parked)
        if seen[0] != versions:
            self._for_version = [call for call in self._for_version if call in self._parked]
            return [*self._for_version, *fresh]
        return fresh

    def _answer(self, published: Published, policies: Policies, pull: PullAsked) -> Effect | None:
        if isinstance(pull.want, _AtAClock):
            return self._answer_clock(published.kept[-1], policies, pull)
        given = published.given
        match pull.want:
            case AtLeast(version):
                return AnswerPull(pull.call, given, self.floor) if given >= version else None
            case Exactly(version):
                if version > given:
                    return None
                if version in published.kept:
                    return AnswerPull(pull.call, version, self.floor)
                return Refuse(
                    pull.call, Refusal.GONE, f"version {version} is dropped, the newest is {published.kept[-1]}"
                )
            case Latest():
                return AnswerPull(pull.call, given, self.floor)

    def _answer_clock(self, newest: int, policies: Policies, pull: PullAsked) -> Effect | None:
        if pull.worker not in self._members:
            return None
        if policies.gate is None:
            return Refuse(pull.call, Refusal.STALE, "the job is synchronous now: ask for a version, not for a clock")
        clock, slowest = self._clocks.of.get(pull.worker), self._clocks.slowest
        if clock is None or slowest is None:  # idle by now, and the caller gone
            return None
        if policies.held_back or not policies.gate.admits(clock, slowest):
            return None
        self.max_spread = max(self.max_spread, clock - slowest)
        return AnswerPull(pull.call, newest, self.floor)

    # ---- for tests

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert set(self.clocks) <= self._members, "a clock of somebody who is no member"
        assert self._clocks.slowest == min(self.clocks.values(), default=None), "the slowest clock is another one"
        assert self._clocks.slowest is None or self._clocks.slowest >= self.floor, "the slowest clock moved back"
