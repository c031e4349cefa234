"""The state machine of one synchronous worker: it decides what to compute, add up and push, when to ask and to wait.

The slices of a step are dealt out in contiguous ranges. While no worker asks for work, a worker adds up contributions
as far as the reduction tree allows, and pushes few, large ones. A worker that waits for the next version asks a server
for slices of others. A worker whose slices others take over asks before it begins one, and pushes each at once.

The machine sees slices, nodes and times, never a gradient. The shell around it (the worker, the simulation, a test)
keeps the contributions by their nodes, tells what happens and performs the effects in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from paramserver.core.versions.audits import Audit
from paramserver.core.versions.reduction import Node, cover, sibling
from paramserver.core.work.positions import fixed_share
from paramserver.core.work.slices import Range, assign
from paramserver.core.work.speed import Speed
from paramserver.core.work.stealing import Ask, Assignment
from paramserver.core.work.sync_events import (
    Add,
    Answered,
    AskForWork,
    Compute,
    Computed,
    Drop,
    Effect,
    Event,
    Exchange,
    Exchanged,
    Leaving,
    NotAnswered,
    NotNeeded,
    Patience,
    PatienceOver,
    Push,
    PushAndWait,
    PushesArrived,
    PutOff,
    SharesChanged,
    SliceWanted,
    StepBegan,
    StopWaiting,
    Wait,
)


class SyncWorkerState:
    """One worker, which may ask ``servers`` servers for work. All changes go through :meth:`handle`.

    ``worker``: its member number in assignments; 0: the receiver fills it in. ``moves``: slices may go from one
    worker to another within a step. ``positions``: above 0, slice positions belong to workers for good
    (`core/work/positions.py`), and a full step has so many. ``audit``: slices of other workers that are computed here,
    too, after the own ones; None: there are none.
    """

    def __init__(
        self, servers: int, worker: int = 0, moves: bool = True, positions: int = 0, audit: Audit | None = None
    ) -> None:
        self.moves, self._audit = moves, audit
        # Of the present step: the slices that are to be audited here, and the one that is computed for that now.
        self._audits: list[int] = []
        self._auditing: int | None = None
        # The present step, how many slices it has, and which of them are this worker's.
        self.step, self.of = -1, 0
        self.range: Range = (0, 0)
        self._worker, self._servers, self._positions = worker, servers, positions
        self._place, self._workers = -1, 0
        self._speed = Speed()
        # Of the present step: slices that are computed here, and slices of the own range that others compute.
        self._done: set[int] = set()
        self._left: set[int] = set()
        # The slice that this worker was given to compute next.
        self._given: int | None = None
        # The slice that another one waits for, which is computed next.
        self._first: int | None = None
        # Contributions are pushed at once; others may have been given slices of the own range.
        self._hurry = self._given_away = False
        # Contributions that are kept back to be added to others; nodes that are pushed when they are whole.
        self._held: set[Node] = set()
        self._targets: frozenset[Node] = frozenset()
        # The server that is asked next.
        self._server = 0
        # The node of the last PushAndWait, and when that began. Whether the last effect was a Wait, since when, and how
        # long the worker had waited before.
        self._exchanging: tuple[Node, float] = (0, 0), 0.0
        self._waits, self._waits_since, self._waited_s = False, 0.0, 0.0

    # ---- facts

    @property
    def assignment(self) -> Assignment | None:
        """This worker's assignment, which servers are told; None where slices do not move."""
        return self._assignment() if self.moves else None

    def share(self, of: int, place: int, workers: int) -> Range:
        """The range of a step of ``of`` slices that the worker at this place computes; place -1 has none."""
        if place < 0:
            return 0, 0
        if self._positions:
            return fixed_share(of, self._positions, place, workers)
        return assign(of, workers)[place]

    def coming(self, after: int = 0) -> int | None:
        """The first slice of the own range, from ``after`` on, that is still to be computed here."""
        return next(self._own(after), None)

    def expects(self, slice_: int) -> bool:
        """Whether this slice of the present step can be handed in."""
        return slice_ not in self._done

    def alone(self, slice_: int) -> bool:
        """Whether the slice is all that this worker has in this step, so that it is pushed as it is."""
        return self.range == (slice_, slice_ + 1) and not self._given_away

    def others(self, slice_: int) -> frozenset[int]:
        """The slices of the own range, beside this one, that nobody has handed in here."""
        return frozenset(range(*self.range)) - self._done - {slice_}

    @property
    def offers(self) -> Range:
        """The slices whose contributions may be added to those of other workers before the push.

        None if this worker hurries, since others may take its slices.
        """
        return self.range if self.moves and not self._hurry else (0, 0)

    @property
    def work_s(self) -> float:
        """Seconds that a slice usually takes, until its push has arrived; 0: not known."""
        return self._speed.work_s

    # ---- the one door

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event at ``now`` (seconds of any clock); return the effects to perform, in order."""
        match event:
            case StepBegan():
                return self._step_began(event, now)
            case SharesChanged(place, workers):
                pushes = self._release()
                # A worker that has left may have computed slices of the new range, or have seen the step complete.
                self._given_away |= self.moves and workers < self._workers
                self._deal(place, workers)
                return pushes
            case SliceWanted():
                return self._slice_wanted(now)
            case Computed():
                return self._computed(event, now)
            case Exchanged(outcome):
                return self._exchanged(outcome, now)
            case PushesArrived():
                self._speed.pushed(now - self._waits_since)
                waited_s, self._waited_s = self._waited_s, 0.0
                return [Patience(max(0.0, self._speed.patience_s() - waited_s))] if self.moves else []
            case PatienceOver():
                return [self._ask()]
            case Answered() | NotAnswered():
                if isinstance(event, Answered) and event.complete:
                    self._server = (self._server + 1) % self._servers
                return self._answered_waiting(event) if self._waits else self._answered(event, now)
            case PutOff(first):
                self._first = first
                return []
            case Leaving():
                return self._release()

    # ---- steps and shares

    def _step_began(self, event: StepBegan, now: float) -> list[Effect]:
        lost = sum(self.range[0] <= slice_ < self.range[1] for slice_ in event.taken)
        self._speed.step(now, lost, max(1, event.step - self.step))
        self.step, self.of = event.step, event.of
        self._done.clear()
        self._given = self._first = None
        self._given_away, self._hurry = False, self._speed.slow
        self._server = 0
        held, self._held = self._held, set()
        self._deal(event.place, event.workers)
        return [Drop(node) for node in sorted(held)]

    def _deal(self, place: int, workers: int) -> None:
        self._place, self._workers = place, workers
        self._left.clear()
        self.range = self.share(self.of, place, workers)
        self._auditing = None
        if self._audit is not None:
            ranges = [self.share(self.of, one, workers) for one in range(workers)]
            self._audits = [slice_ for slice_ in self._audit.of(self.step, ranges, place) if slice_ not in self._done]
        self._targets = frozenset(cover(*self.range, self.of))

    def _own(self, after: int = 0) -> Iterator[int]:
        """The slices of the own range that are still to be computed here."""
        lo, hi = self.range
        return (p for p in range(max(lo, after), hi) if p not in self._done and p not in self._left)

    # ---- the next slice

    def _slice_wanted(self, now: float) -> list[Effect]:
        self._waits = False
        first, self._first = self._first, None
        if first is not None and first in self.others(-1):
            return self._compute(first, now, unplanned=True)
        if self._given is not None:
            return self._compute_given(self._given, now)
        own = self.coming()
        if own is None and self._audits:
            self._auditing = self._audits.pop(0)
            return self._compute(self._auditing, now, unplanned=True)
        if own is None:
            return [self._wait(now)]
        if self.moves and (self._given_away or self._speed.asks(now, first=not self._done)):
            return [self._ask()]
        return self._compute(own, now)

    def _answered(self, event: Answered | NotAnswered, now: float) -> list[Effect]:
        """An answer before a slice is begun."""
        if isinstance(event, NotAnswered):  # as if there were no other workers
            own = self.coming()
            assert own is not None, "a worker asks before it begins a slice"
            return self._compute(own, now)
        self._hurry = self._given_away = True
        then = [self._wait(now)] if event.slice is None else self._compute_given(event.slice, now)
        return [*self._release(), *then]

    def _compute_given(self, slice_: int, now: float) -> list[Effect]:
        self._given = None
        if slice_ in self._done:
            return [self._wait(now)]
        unplanned = slice_ in self._left or not self.range[0] <= slice_ < self.range[1]
        self._left.update(p for p in self._own() if unplanned or p < slice_)
        return self._compute(slice_, now, unplanned)

    def _compute(self, slice_: int, now: float, unplanned: bool = False) -> list[Effect]:
        self._speed.begun(now)
        return [Compute(slice_, unplanned)]

    # ---- contributions

    def _computed(self, event: Computed, now: float) -> list[Effect]:
        self._speed.finished(now - event.stalled_s)
        slice_, audited = event.slice, self._auditing
        self._auditing = None
        if event.step != self.step or slice_ in self._done or slice_ == audited:
            return [NotNeeded()]
        if slice_ in self._audits:  # it was given to this worker, so it counts
            self._audits.remove(slice_)
        self._done.add(slice_)
        node = (slice_, slice_ + 1)
        if self._hurry or event.apart or not self.range[0] <= slice_ < self.range[1]:
            effects: list[Effect] = [Push(node)]
        else:
            effects = self._add(node)
        if self.coming() is not None:
            return effects
        # Neighbours that were handed in before the shares changed never come to be added.
        effects += self._release()
        if self._audits:
            return effects
        pushes = [effect.node for effect in effects if isinstance(effect, Push)]
        if len(pushes) > 1:
            return [*effects, self._wait(now)]
        self._exchanging = pushes[0], now
        patience_s = self._speed.patience_s() if self.moves else math.inf
        return [*effects[:-1], PushAndWait(pushes[0], patience_s, self.assignment)]

    def _add(self, node: Node) -> list[Effect]:
        """Add a contribution to those held, as far as the tree allows; push a sum that cannot grow further."""
        effects: list[Effect] = []
        while (other := sibling(node, self.of)) in self._held:
            assert other is not None
            self._held.remove(other)
            left, right = sorted((node, other))
            effects.append(Add(left, right))
            node = left[0], right[1]
        if node in self._targets:
            return [*effects, Push(node)]
        self._held.add(node)
        return effects

    def _release(self) -> list[Effect]:
        """Push all contributions that are held."""
        held, self._held = self._held, set()
        return [Push(node) for node in sorted(held)]

    def _exchanged(self, outcome: Exchange, now: float) -> list[Effect]:
        node, began = self._exchanging
        if outcome is Exchange.DONE:
            return []
        wait = self._wait(now, now - began)
        return [wait] if outcome is Exchange.PUSHED else [Push(node), wait]

    # ---- waiting for the next version

    def _wait(self, now: float, waited_s: float = 0.0) -> Wait:
        """``waited_s``: the worker has waited so many seconds already."""
        self._waits, self._waits_since, self._waited_s = True, now, waited_s
        return Wait(self.assignment)

    def _answered_waiting(self, event: Answered | NotAnswered) -> list[Effect]:
        given = event.slice if isinstance(event, Answered) else self._first_not_done()
        if isinstance(event, Answered) or given is None:
            self._speed.answered(given is not None)
        if given is None:
            return [Patience(self._speed.patience_s())]
        self._given = given
        self._hurry = self._given_away = True
        return [StopWaiting(given)]

    def _first_not_done(self) -> int | None:
        """The slice to compute if no server answers: one of the own range that perhaps no other worker computes."""
        return next((p for p in range(*self.range) if p not in self._done), None)

    def _ask(self) -> AskForWork:
        return AskForWork(self._server, Ask(self._assignment(), self.step, self.of, frozenset(self._done)))

    def _assignment(self) -> Assignment:
        return Assignment(self._worker, self._place, self._workers, self._speed.work_s)
