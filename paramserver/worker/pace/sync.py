"""Synchronous: a range of every step's slices, and a barrier after each step. `core.work.sync_worker` has the rules."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paramserver import errors
from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.host_sums import patience_s
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.ranges import RangeSet
from paramserver.core.versions.reduction import Node as TreeNode
from paramserver.core.work.positions import flushes
from paramserver.core.work.slices import Range, SyncSchedule
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
from paramserver.core.work.sync_worker import SyncWorkerState
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import assignment_to_proto
from paramserver.worker.flat import PartialSum
from paramserver.worker.gradients.sender import PushFuture, Sender
from paramserver.worker.job.audited import Audited
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.phases import WAIT
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.links.pulls import Pull
from paramserver.worker.pace.item import Item
from paramserver.worker.weights.pulled import Pulled
from paramserver.worker.weights.weights import Weights


class SyncPace:
    """Performs what the state machine of a synchronous worker decides: gradients, messages and waits."""

    def __init__(
        self,
        member: Member,
        modes: Modes,
        shards: Shards,
        slices: Slices,
        weights: Weights,
        sender: Sender,
        schedule: SyncSchedule,
        audited: Audited,
    ) -> None:
        self._audited, self._timeline = audited, shards.timeline
        self._member, self._modes, self._links, self._weights = member, modes, shards.links, weights
        self._sender, self._schedule = sender, schedule
        # Equal names of slices mean equal contributions.
        self._named_by_data = slices.named_by_data
        self._generation: tuple[int, ...] = (-1, -1)
        keeps = sender.outgoing.keeps
        self._state = SyncWorkerState(
            servers=len(self._links.channels),
            moves=self._named_by_data and not keeps,
            positions=schedule.slices_per_step if keeps else 0,
            audit=audited.audit if self._named_by_data else None,
        )
        # While the training loop waits, the background tells the machine of events. Each wait has a number.
        self._lock, self._wait_number = threading.Lock(), 0
        # Contributions that were handed in and not pushed; pushes under way; whether the last contribution counted.
        self._held: dict[TreeNode, PartialSum] = {}
        self._pushes: list[PushFuture] = []
        self._groups: Sequence[types_pb2.GroupHypers] = ()
        self._counted = True
        # The slices of a step that the other workers of this host were told of.
        self._expected: tuple[int, ...] = ()

    # ---- the face of a pace

    def next(self, epoch: int, last: bool) -> Item | None:
        """The slice to compute now; waits for versions while there is none."""
        while True:
            self._look()
            if self._schedule.step(self._weights.version).epoch > epoch:
                return None
            effect = self._tell(SliceWanted())
            if effect is not None:
                return self._item(self._state.step, effect.slice, effect.unplanned)
            if self._modes.changed():
                return None

    def expects(self, item: Item) -> bool:
        """Whether the item is of the present step, and not handed in."""
        name = item.name
        if not isinstance(name, SyncName) or name.step != self._weights.version:
            return False
        return name.step != self._state.step or self._state.expects(name.lo)

    def alone(self, item: Item) -> bool:
        """Whether the slice is all that this worker has in this step, so that its contribution is pushed as it is."""
        return isinstance(item.name, SyncName) and self._state.alone(item.name.lo)

    def others(self, name: SyncName) -> frozenset[int]:
        """The slices of the present step, beside this one, that this worker has to compute."""
        self._look()
        return self._state.others(name.lo)

    def share(self, name: SyncName, place: int, workers: int) -> Range:
        """The range of this slice's step that belongs to the worker at this place."""
        return self._state.share(name.of, place, workers)

    def put_off(self, first: int) -> None:
        """The slice that was computed last needs a part of slice ``first``, which is computed next."""
        self._tell(PutOff(first))

    def ahead(self, epoch: int) -> Iterator[Item]:
        """This worker's ranges of this and the following steps, without the slices that other workers have taken."""
        state = self._state
        version, position, lowest = state.step, 0, state.range[0]
        while True:
            if version < state.step or state.range[0] < lowest:  # also if this worker has got slices of one that left
                version, position = state.step, 0
            lowest = state.range[0]
            step = self._schedule.step(version)
            if step.epoch > epoch:
                return
            # The membership may have changed since this step's range was dealt out. `next` looks at it.
            place, workers = self._member.place()
            if version == state.step:
                coming = state.coming(position)
            elif place < 0:
                return
            else:
                lo, hi = state.share(len(step.slices), place, workers)
                coming = max(lo, position) if max(lo, position) < hi else None
            if coming is None:
                version, position = version + 1, 0
            else:
                position = coming + 1
                yield self._item(version, coming)

    def contribute(self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Add the contribution to its neighbours as far as the fixed tree allows; push sums that are complete."""
        name, sender = item.name, self._sender
        assert isinstance(name, SyncName)
        self._look()
        self._groups, self._counted = groups, True
        self._audited.computed(self._timeline, name, partial)
        apart = sender.outgoing.lossy or not self._named_by_data
        effects = self._handle(Computed(name.step, name.lo, self._weights.stalled_s, apart))
        if effects == [NotNeeded()]:
            sender.discard(partial)
            if not self._named_by_data:
                sender.handed.passed_over()
            return self._named_by_data
        self._held[name.lo, name.hi] = partial
        self._perform(effects)
        return self._counted

    @property
    def unsent(self) -> int:
        """How many slices were handed in and wait for others of their step, to be sent as one."""
        return sum(hi - lo for lo, hi in list(self._held))

    def finish(self) -> None:
        """Wait until everything handed in has arrived."""
        self._tell(Leaving())
        self._wait_for_pushes()

    # ---- the machine

    def _look(self) -> None:
        """Tell of a new version or a new membership."""
        version, generation = self._weights.version, self._member.generation
        if self._state.step == version and generation == self._generation:
            return
        place, workers = self._member.place()
        if self._state.step == version:
            self._tell(SharesChanged(place, workers))
        else:
            of = len(self._schedule.step(version).slices)
            self._tell(StepBegan(version, of, place, workers, self._weights.taken))
        self._generation = generation
        self._links.pushes.shared_by(workers)
        self._sender.keep_residuals(range(*self._state.range))

    def _handle(self, event: Event) -> list[Effect]:
        with self._lock:
            effects = self._state.handle(event, time.monotonic())
        self._tell_host()
        return effects

    def _tell_host(self) -> None:
        """Tell the worker that pushes for this host which slices it can expect."""
        host, state = self._links.host, self._state
        share = state.step, state.of, *(state.offers if not self._sender.outgoing.lossy else (0, 0))
        if host is not None and share != self._expected:
            self._expected = share
            host.expect(*share, patience_s(state.work_s))

    def _tell(self, event: Event) -> Compute | None:
        return self._perform(self._handle(event))

    def _perform(self, effects: Sequence[Effect]) -> Compute | None:
        """Perform the effects in the thread that trains; returns the slice to compute, if that is next."""
        held = self._held
        for effect in effects:
            match effect:
                case Compute():
                    return effect
                case Add(left, right):
                    whole, added = held.pop(left), held.pop(right)
                    whole.absorb(added)
                    self._sender.discard(added)
                    held[left[0], right[1]] = whole
                case Drop(where):
                    self._sender.discard(held.pop(where))
                case Push(where):
                    self._push(where)
                case PushAndWait(where, patience_s, assignment):
                    self._tell(Exchanged(self._exchange(where, patience_s, assignment)))
                case AskForWork(server, ask):
                    return self._tell(_answer(self._member.do(self._links.questions.steal(server, _question(ask)))))
                case Wait(assignment):
                    self._wait(assignment)
                case _:
                    raise AssertionError(f"{effect} belongs to a wait")
        return None

    # ---- contributions

    def _push(self, where: TreeNode) -> None:
        """Begin to bring a contribution; without a data set, wait until it is known whether it counts."""
        name, sender = self._name(where), self._sender
        outgoing = sender.outgoing
        flush = outgoing.keeps and flushes(self._schedule, name.step, name.lo, outgoing.wire.flush_every)
        push = sender.push(name, self._held.pop(where), self._groups, clock=0, flush=flush)
        if self._named_by_data:
            self._pushes.append(push)
        else:
            self._counted = sender.wait_all([push])

    def _exchange(self, where: TreeNode, patience_s: float, assignment: Assignment | None) -> Exchange:
        """Push with the question for the next version, where that can be one message."""
        if self._pushes or not self._named_by_data:
            return Exchange.NOT_MADE
        self._links.pulls.say(assignment)
        former = self._member.phases.enter(WAIT)
        try:
            done = self._sender.exchange(self._name(where), self._held[where], self._groups, patience_s)
        finally:
            self._member.phases.enter(former)
        if done is None:
            return Exchange.NOT_MADE
        del self._held[where]
        return Exchange.DONE if done else Exchange.PUSHED

    def _wait_for_pushes(self) -> None:
        self._sender.wait_all(self._pushes)
        self._pushes.clear()

    # ---- waiting for the next version

    def _wait(self, assignment: Assignment | None) -> None:
        """Wait for the next version, for a slice to compute, or another membership."""
        self._links.pulls.say(assignment)
        former = self._member.phases.enter(WAIT)
        # Asked for beside the pushes: servers answer when all contributions of the step have come.
        pulling = self._sender.begin_pull(self._state.step + 1)
        try:
            if not self._state.moves:
                self._wait_for_pushes()
            self._advance(pulling)
        except BaseException:
            pulling.cancel()
            raise
        finally:
            self._member.phases.enter(former)
            with self._lock:
                self._wait_number += 1
        self._wait_for_pushes()

    def _advance(self, pulling: concurrent.futures.Future[list[Pulled]]) -> None:
        """Take in the next version, unless there is a slice to compute before or a new membership.

        ``pulling`` asks for that version.
        """
        member, pulls, version, generation = self._member, self._links.pulls, self._state.step + 1, self._generation

        def moved() -> bool:
            return member.generation != generation

        if pulling.done() or not self._state.moves:
            results = member.wait_unless(pulling, moved)
        else:
            found = member.wait_unless(member.submit(self._meanwhile(pulling, self._wait_number)), moved)
            if isinstance(found, int):
                pulling.cancel()
                return
            results = found
        if results is None:
            pulling.cancel()
            if not member.run(pulls.published(version)):
                return
            # A worker that left had seen this step complete: no slice of it has to be computed again.
            results = member.do(pulls.ask(Pull(AtLeast(version))))
        self._weights.install(results)

    async def _meanwhile(self, version: concurrent.futures.Future[list[Pulled]], number: int) -> list[Pulled] | int:
        """The next version, or the number of a slice to compute meanwhile; the pull ``version`` is then cancelled.

        Runs in the background. Raises the error of a push.
        """
        pulling = asyncio.wrap_future(version)
        try:
            await _all_pushed(self._pushes)
            event: Event = PushesArrived()
            while True:
                with self._lock:
                    if self._wait_number != number:  # the training loop has gone on, with another membership
                        raise asyncio.CancelledError
                    (effect,) = self._state.handle(event, time.monotonic())
                match effect:
                    case Patience(seconds):
                        await asyncio.wait([pulling], timeout=seconds)
                        event = PatienceOver()
                    case AskForWork(server, ask):
                        event = _answer(await self._links.questions.steal(server, _question(ask)))
                    case StopWaiting(slice_):
                        return slice_
                if pulling.done():
                    return pulling.result()
        finally:
            # Its version may be old when the slice is computed.
            pulling.cancel()

    # ---- names

    def _item(self, version: int, position: int, unplanned: bool = False) -> Item:
        step = self._schedule.step(version)
        name = SyncName(version, position, position + 1, len(step.slices))
        return Item(name, step.epoch, step.slices[position], unplanned)

    def _name(self, where: TreeNode) -> SyncName:
        return SyncName(self._state.step, *where, self._state.of)


def _question(ask: Ask) -> shard_pb2.StealRequest:
    finished = RangeSet.from_ranges((p, p + 1) for p in ask.finished)
    return shard_pb2.StealRequest(
        step=ask.step,
        of=ask.of,
        assignment=assignment_to_proto(ask.assignment),
        finished=[types_pb2.Range(start=lo, stop=hi) for lo, hi in finished.ranges()],
    )


def _answer(reply: shard_pb2.StealResponse | None) -> Answered | NotAnswered:
    if reply is None:
        return NotAnswered()
    return Answered(reply.slice if reply.HasField("slice") else None, reply.complete)


async def _all_pushed(pushes: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Wait until all pushes are over; raises the error of the first push that has failed. All end in this loop."""
    over = asyncio.Event()
    for push in pushes:
        push.add_done_callback(lambda _: over.set())
    for push in pushes:
        while not push.done():
            over.clear()
            await over.wait()
        if push.cancelled():
            raise errors.RolledBackError("the job goes back to a checkpoint")
        error = push.exception()
        # A StaleViewError means that the mode has changed meanwhile, which is no mistake.
        if error is not None and type(error) is not errors.StaleViewError:
            raise error
