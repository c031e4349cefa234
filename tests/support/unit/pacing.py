"""Synchronous workers of any speed around one shard, in simulated time. Each worker is the real state machine.

The simulation checks what the state machine decides: a contribution is added and pushed as the reduction tree allows,
each slice is pushed once by whoever has computed it, and nobody waits who has something to do.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from paramserver.core.versions.reduction import Node, cover, is_node, sibling
from paramserver.core.work.stealing import Stealing
from paramserver.core.work.sync_events import (
    Add,
    Answered,
    AskForWork,
    Compute,
    Computed,
    Drop,
    Event,
    Exchange,
    Exchanged,
    NotAnswered,
    NotNeeded,
    Patience,
    PatienceOver,
    Push,
    PushAndWait,
    PushesArrived,
    SharesChanged,
    SliceWanted,
    StepBegan,
    StopWaiting,
    Wait,
)
from paramserver.core.work.sync_worker import SyncWorkerState

# How long a message takes, in seconds of the simulation.
MESSAGE_S = 0.001
# A schedule that takes more events than that goes round in circles.
MOST_EVENTS = 20_000


@dataclass(eq=False)
class Hand:
    """One worker: its state machine, and what a shell keeps for it."""

    number: int
    state: SyncWorkerState
    view: tuple[int, ...]  # the workers that have shares, as this one has heard
    seen: tuple[int, ...] = ()  # of them, what its state machine was told
    generation: int = 0
    gone: bool = False
    computing: bool = False
    waiting: bool = False
    told_to_wait: bool = False  # the answer to its last question was that there is nothing to do
    wait: int = 0  # what was planned in an earlier wait is void
    on_their_way: int = 0
    nodes: set[Node] = field(default_factory=set)  # computed and not pushed
    pushed: list[Node] = field(default_factory=list)  # of the present step
    undisturbed: bool = True  # it has heard of nobody else in the present step


class Simulation:
    """``speed(worker, step, now)``: seconds for the next slice. ``failing``: the share of questions without answer.

    ``message``: seconds that a message takes. ``exchanges``: the share of last pushes that are one call with the wait.
    ``moves`` and ``positions``: as the state machine has them; with positions, a full step has ``of`` slices.
    """

    def __init__(
        self,
        workers: int,
        of: int,
        speed: Callable[[int, int, float], float],
        failing: float = 0.0,
        seed: int = 0,
        message: Callable[[], float] = lambda: MESSAGE_S,
        exchanges: float = 0.0,
        moves: bool = True,
        positions: bool = False,
    ) -> None:
        self.of, self.speed, self.failing = of, speed, failing
        self.version = 0
        self.step_times: list[float] = []
        self.questions = self.duplicates = self.most_copies = self.events = 0
        # Slices that each worker brought first, by step and worker.
        self.by: Counter[tuple[int, int]] = Counter()
        self._covered: list[set[int]] = []
        self._chance = random.Random(seed)
        self._message, self._exchanges = message, exchanges
        self._stealing = Stealing()
        self._arrived: set[int] = set()
        self._begun: Counter[int] = Counter()
        self._published_at = 0.0
        self._generation = 0
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()
        everybody = tuple(range(workers))
        self.hands = [
            Hand(n, SyncWorkerState(1, n + 1, moves=moves, positions=of if positions else 0), everybody)
            for n in everybody
        ]
        for hand in self.hands:
            self.at(0.0, partial(self._go_on, hand))

    def run(self, steps: int) -> None:
        """Go on until so many versions are published; fails if nobody goes on before."""
        while self.version < steps:
            assert self._queue, f"nobody goes on in step {self.version}: {sorted(self._arrived)} of {self.of} are there"
            self.events += 1
            assert self.events < MOST_EVENTS, f"step {self.version} does not end"
            now, _, what = heapq.heappop(self._queue)
            what(now)

    def check(self) -> None:
        """Every step had all slices."""
        assert all(covered == set(range(self.of)) for covered in self._covered)
        assert len(self._covered) == self.version

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Have this done then."""
        heapq.heappush(self._queue, (when, next(self._number), what))

    # ---- members

    def change(self, workers: Sequence[int], now: float) -> None:
        """From now on these have shares, as far as they are there; each worker hears of it a message later."""
        self._stealing.keep(hand.number + 1 for hand in self.hands if not hand.gone)
        view = tuple(number for number in workers if not self.hands[number].gone)
        self._generation += 1
        for hand in self.hands:
            self.at(now + self._message(), partial(self._hears, hand, self._generation, view))

    def lose(self, number: int, now: float) -> None:
        """One is gone for good, with all that it has not pushed; the others share."""
        self.hands[number].gone = True
        self.change([hand.number for hand in self.hands if not hand.gone], now)

    def _hears(self, hand: Hand, generation: int, view: tuple[int, ...], now: float) -> None:
        if generation < hand.generation:
            return
        hand.generation, hand.view = generation, view
        if hand.waiting and not hand.gone:
            self._go_on(hand, now)

    # ---- the shard

    def _arrives(self, hand: Hand, step: int, node: Node, now: float) -> None:
        hand.on_their_way -= 1
        if step == self.version:
            for slice_ in range(*node):
                self.by[step, hand.number] += slice_ not in self._arrived
                self._arrived.add(slice_)
            if len(self._arrived) == self.of:
                self._publish(now)
        if hand.waiting and not hand.on_their_way and not hand.gone:
            self._tell(hand, PushesArrived(), now)

    def _publish(self, now: float) -> None:
        self.step_times.append(now - self._published_at)
        self.most_copies = max(self.most_copies, *self._begun.values())
        self.duplicates += self._begun.total() - self.of
        self._covered.append(set(self._arrived))
        self._published_at = now
        self.version += 1
        self._stealing.begin(self.version, now)
        self._arrived.clear()
        self._begun.clear()
        for hand in self.hands:
            if hand.waiting:
                self._later(hand, self._message(), self._go_on, now)

    def _answer(self, hand: Hand, effect: AskForWork, now: float) -> Event:
        self.questions += 1
        if self._chance.random() < self.failing:
            return NotAnswered()
        if effect.ask.step != self.version:
            return Answered(None)
        missing = [(s, s + 1) for s in range(self.of) if s not in self._arrived]
        return Answered(self._stealing.ask(effect.ask, missing, now))

    # ---- the workers

    def _later(self, hand: Hand, seconds: float, what: Callable[[Hand, float], None], now: float) -> None:
        """Do it then, unless this wait is over by then."""
        wait = hand.wait

        def then(when: float) -> None:
            if hand.wait == wait and not hand.gone:
                what(hand, when)

        self.at(now + seconds, then)

    def _look(self, hand: Hand, now: float) -> None:
        """Tell of a new version and of other shares, as a shell does."""
        place = hand.view.index(hand.number) if hand.number in hand.view else -1
        if hand.state.step != self.version:
            taken = self._stealing.taken(self.version)
            before = hand.nodes
            hand.nodes, hand.pushed, hand.undisturbed = set(), [], True
            if (standing := hand.state.assignment) is not None and self.version:
                self._stealing.given(standing, self.version)
            event: Event = StepBegan(self.version, self.of, place, len(hand.view), taken)
            effects = hand.state.handle(event, now)
            assert effects == [Drop(node) for node in sorted(before)], "what nobody needs any more is dropped"
        elif hand.seen != hand.view:
            hand.undisturbed = False
            self._tell(hand, SharesChanged(place, len(hand.view)), now)
            assert not hand.nodes, "what belongs to other shares is never added up"
        hand.seen = hand.view

    def _go_on(self, hand: Hand, now: float) -> None:
        """The wait is over."""
        hand.waiting, hand.wait = False, hand.wait + 1
        self._look(hand, now)
        self._tell(hand, SliceWanted(), now)

    def _computed(self, hand: Hand, step: int, slice_: int, now: float) -> None:
        if hand.gone:
            return
        hand.computing = False
        self._look(hand, now)
        effects = hand.state.handle(Computed(step, slice_), now)
        assert (effects == [NotNeeded()]) == (step != hand.state.step), "a slice is computed once by one worker"
        if effects != [NotNeeded()]:
            hand.nodes.add((slice_, slice_ + 1))
            self._perform(hand, effects, now)
        if not hand.waiting and not hand.computing:
            self._tell(hand, SliceWanted(), now)

    def _tell(self, hand: Hand, event: Event, now: float) -> None:
        self._perform(hand, hand.state.handle(event, now), now)

    def _perform(self, hand: Hand, effects: Sequence[object], now: float) -> None:
        state = hand.state
        for effect in effects:
            match effect:
                case Compute(slice_, unplanned):
                    assert not hand.computing
                    assert state.expects(slice_), "nobody computes a slice twice"
                    assert unplanned or state.range[0] <= slice_ < state.range[1]
                    hand.computing, hand.told_to_wait = True, False
                    hand.undisturbed &= not unplanned
                    if state.step == self.version:
                        self._begun[slice_] += 1
                    takes_s = self.speed(hand.number, state.step, now)
                    self.at(now + takes_s, partial(self._computed, hand, state.step, slice_))
                case Add(left, right):
                    assert sibling(left, self.of) == right, "only halves of a node are added"
                    hand.nodes -= {left, right}
                    hand.nodes.add((left[0], right[1]))
                case Push(node):
                    self._push(hand, node, now)
                case PushAndWait(node, patience_s):
                    assert hand.nodes == {node}, "all the rest was pushed"
                    self._exchange(hand, node, patience_s, now)
                case AskForWork():
                    hand.undisturbed = False
                    self.at(now + self._message(), partial(self._asked, hand, hand.wait, effect))
                case Wait():
                    assert not hand.nodes, "who waits keeps nothing back"
                    assert hand.told_to_wait or state.coming() is None, "who has a slice to compute does not wait"
                    self._wait(hand, now)
                case Patience(seconds):
                    self._later(hand, seconds, self._out_of_patience, now)
                case StopWaiting(slice_):
                    hand.undisturbed = False
                    assert state.expects(slice_)
                    self._go_on(hand, now)
                case _:
                    raise AssertionError(effect)

    def _out_of_patience(self, hand: Hand, now: float) -> None:
        self._tell(hand, PatienceOver(), now)

    def _push(self, hand: Hand, node: Node, now: float) -> None:
        assert is_node(*node, self.of)
        hand.nodes.remove(node)  # it was computed, and not pushed before
        assert all(node[1] <= lo or hi <= node[0] for lo, hi in hand.pushed), "a worker pushes a slice once"
        hand.pushed.append(node)
        hand.on_their_way += 1
        self.at(now + self._message(), partial(self._arrives, hand, hand.state.step, node))

    def _exchange(self, hand: Hand, node: Node, patience_s: float, now: float) -> None:
        if hand.on_their_way or self._chance.random() >= self._exchanges:
            return self._tell(hand, Exchanged(Exchange.NOT_MADE), now)
        self._push(hand, node, now)
        step = hand.state.step
        hand.computing = True  # it is in a call, which neither a version nor other shares interrupt

        def over(when: float) -> None:
            hand.computing = False
            if hand.gone:
                return
            there = self.version > step
            self._tell(hand, Exchanged(Exchange.DONE if there else Exchange.PUSHED), when)
            if there:
                self._go_on(hand, when)

        self.at(now + 2.0 * MESSAGE_S + min(patience_s, 0.25), over)
        return None

    def _asked(self, hand: Hand, wait: int, effect: AskForWork, now: float) -> None:
        if hand.wait != wait or hand.gone:
            return
        event = self._answer(hand, effect, now)
        hand.told_to_wait = event == Answered(None)
        self._tell(hand, event, now)

    def _wait(self, hand: Hand, now: float) -> None:
        lo, hi = hand.state.range
        if hand.undisturbed:  # who was slow before keeps nothing back
            assert hand.pushed in (list(cover(lo, hi, self.of)), [(p, p + 1) for p in range(lo, hi)])
        hand.waiting = True
        hand.wait += 1
        if hand.state.step != self.version or hand.seen != hand.view:
            self._later(hand, self._message(), self._go_on, now)
        if not hand.on_their_way:
            self._tell(hand, PushesArrived(), now)
