"""Synchronous workers of any speed around one shard, in simulated time: the rules are the real ones."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from paramserver.core.work.slices import assign
from paramserver.core.work.speed import Speed
from paramserver.core.work.stealing import Ask, Assignment, Stealing

# How long a message takes, in seconds of the simulation.
MESSAGE_S = 0.001


class Hand:
    """A worker, as `SyncPace` is one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.speed = Speed()
        self.version = -1
        self.done: set[int] = set()
        self.left: set[int] = set()
        self.held: set[int] = set()
        self.given: int | None = None
        self.hurry = self.given_away = False
        self.waiting = True
        self.turn = 0  # what was planned in an earlier turn is void


class Simulation:
    """``speed(worker, step, now)``: seconds for the next slice. ``failing``: the share of questions without answer."""

    def __init__(
        self,
        workers: int,
        of: int,
        speed: Callable[[int, int, float], float],
        failing: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.of, self.speed, self.failing = of, speed, failing
        self.version = 0
        self.step_times: list[float] = []
        self.questions = self.duplicates = self.most_copies = 0
        # Slices that each worker brought first, by step and worker.
        self.by: Counter[tuple[int, int]] = Counter()
        self._covered: list[set[int]] = []
        self._chance = random.Random(seed)
        self._ranges = assign(of, workers)
        self._stealing = Stealing()
        self._arrived: set[int] = set()
        self._begun: Counter[int] = Counter()
        self._published_at = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self._hands = [Hand(number) for number in range(workers)]
        for hand in self._hands:
            self._at(0.0, self._look, hand, hand.turn)

    def run(self, steps: int) -> None:
        """Go on until so many versions are published; fails if nobody goes on before."""
        while self.version < steps:
            assert self._queue, f"nobody goes on in step {self.version}: {sorted(self._arrived)} of {self.of} are there"
            now, _, what, arguments = heapq.heappop(self._queue)
            what(now, *arguments)

    def check(self) -> None:
        """Every step had all slices."""
        assert all(covered == set(range(self.of)) for covered in self._covered)
        assert len(self._covered) == self.version

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (when, next(self._number), what, arguments))

    # ---- the shard

    def _arrive(self, now: float, worker: int, step: int, slices: Iterable[int]) -> None:
        if step != self.version:
            return
        for slice_ in slices:
            self.by[step, worker] += slice_ not in self._arrived
            self._arrived.add(slice_)
        if len(self._arrived) == self.of:
            self.step_times.append(now - self._published_at)
            self.most_copies = max(self.most_copies, *self._begun.values())
            self.duplicates += self._begun.total() - self.of
            self._covered.append(set(self._arrived))
            self._published_at = now
            self.version += 1
            self._stealing.begin(self.version, now)
            self._arrived.clear()
            self._begun.clear()
            for hand in self._hands:
                if hand.waiting:
                    self._at(now + MESSAGE_S, self._look, hand, hand.turn)

    def _answer(self, now: float, hand: Hand) -> tuple[bool, int | None]:
        """(answered, slice)."""
        self.questions += 1
        if self._chance.random() < self.failing:
            return False, None
        if hand.version != self.version:
            return True, None
        missing = [(s, s + 1) for s in range(self.of) if s not in self._arrived]
        question = Ask(self._assignment(hand), hand.version, self.of, frozenset(hand.done))
        return True, self._stealing.ask(question, missing, now)

    # ---- the workers

    def _assignment(self, hand: Hand) -> Assignment:
        return Assignment(hand.number + 1, hand.number, len(self._ranges), hand.speed.work_s)

    def _mine(self, hand: Hand) -> list[int]:
        return [p for p in range(*self._ranges[hand.number]) if p not in hand.done and p not in hand.left]

    def _look(self, now: float, hand: Hand, turn: int) -> None:
        if hand.turn != turn:
            return
        hand.waiting = False
        if hand.version != self.version:
            lo, hi = self._ranges[hand.number]
            lost = sum(lo <= s < hi for s in self._stealing.taken(self.version))
            hand.speed.step(now, lost, self.version - hand.version)
            hand.version, hand.given = self.version, None
            hand.hurry, hand.given_away = hand.speed.slow, False
            if self.version:
                self._stealing.given(self._assignment(hand), self.version)
            hand.done, hand.left, hand.held = set(), set(), set()
        self._next(now, hand)

    def _next(self, now: float, hand: Hand) -> None:
        if hand.given is None:
            mine = self._mine(hand)
            if not mine:
                return self._wait(now, hand)
            if not hand.given_away and not hand.speed.asks(now, not hand.done):
                return self._begin(now, hand, mine[0])
            answered, hand.given = self._answer(now, hand)
            if not answered:
                return self._begin(now, hand, mine[0])
            hand.hurry = hand.given_away = True
            self._release(now, hand)
            if hand.given is None:
                return self._wait(now, hand)
        position, hand.given = hand.given, None
        if position in hand.done:
            return self._wait(now, hand)
        lo, hi = self._ranges[hand.number]
        unplanned = position in hand.left or not lo <= position < hi
        hand.left.update(p for p in self._mine(hand) if unplanned or p < position)
        return self._begin(now, hand, position)

    def _begin(self, now: float, hand: Hand, position: int) -> None:
        hand.speed.begun(now)
        hand.turn += 1
        if hand.version == self.version:
            self._begun[position] += 1
        takes_s = self.speed(hand.number, hand.version, now)
        self._at(now + takes_s, self._finish, hand, position)

    def _finish(self, now: float, hand: Hand, position: int) -> None:
        hand.speed.finished(now)
        hand.done.add(position)
        hand.held.add(position)
        lo, hi = self._ranges[hand.number]
        if hand.hurry or not lo <= position < hi or not self._mine(hand):
            self._release(now, hand)
        if self._mine(hand):
            self._next(now, hand)
        else:
            self._wait(now, hand)

    def _release(self, now: float, hand: Hand) -> None:
        if hand.held:
            self._at(now + MESSAGE_S, self._arrive, hand.number, hand.version, frozenset(hand.held))
            hand.held = set()

    def _wait(self, now: float, hand: Hand) -> None:
        hand.waiting = True
        hand.turn += 1
        if hand.version != self.version:
            self._at(now + MESSAGE_S, self._look, hand, hand.turn)
        else:
            self._at(now + hand.speed.patience_s(), self._ask, hand, hand.turn)

    def _ask(self, now: float, hand: Hand, turn: int) -> None:
        if hand.turn != turn or hand.version != self.version:
            return
        answered, slice_ = self._answer(now, hand)
        if not answered:
            own = [p for p in range(*self._ranges[hand.number]) if p not in hand.done]
            slice_ = own[0] if own else None
        else:
            hand.speed.answered(slice_ is not None)
        if slice_ is None:
            return self._wait(now, hand)
        hand.given, hand.waiting = slice_, False
        hand.hurry = hand.given_away = True
        return self._next(now + MESSAGE_S, hand)
