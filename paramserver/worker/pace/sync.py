"""Synchronous: a range of every step's slices for each worker, and a barrier after each step."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paramserver.core.versions.names import SyncName
from paramserver.core.versions.ranges import RangeSet
from paramserver.core.versions.reduction import Node as TreeNode
from paramserver.core.versions.reduction import Reducer, cover
from paramserver.core.work.positions import fixed_share, flushes
from paramserver.core.work.slices import SyncSchedule, assign
from paramserver.core.work.speed import Speed
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.worker.flat import PartialSum
from paramserver.worker.pace.base import Item

if TYPE_CHECKING:
    from paramserver.worker.engine import Engine


class SyncPace:
    """Synchronous: this worker's range of every step's slices, slices of others if it has time, the next version.

    While nobody asks for work, a worker adds up what it has as far as the fixed tree allows and pushes few, large
    contributions. One whose slices others take over asks before it begins a slice, and pushes each at once.
    """

    def __init__(self, engine: Engine, schedule: SyncSchedule) -> None:
        self._engine = engine
        self._schedule = schedule
        self._generation: tuple[int, ...] = (-1, -1)
        self._range = (0, 0)
        self._place, self._workers = -1, 0
        self._of = 0
        self._version = -1
        self._done: set[int] = set()  # slice indices of the present step that are handed in or held
        self._left: set[int] = set()  # slices of the own range that others compute
        self._given: int | None = None  # the slice that this worker was given to compute next
        self._hurry = False  # others wait in this step: nothing is held back
        self._given_away = False  # slices of the own range may have been given to others
        self._speed = Speed()
        self._thief = engine.thief()
        self._reducer: Reducer | None = None
        self._held: dict[TreeNode, PartialSum] = {}
        self._unsent: list[tuple[SyncName, PartialSum]] = []  # contributions that are about to be pushed
        self._pushes: list[concurrent.futures.Future[frozenset[shard_pb2.Outcome]]] = []
        self._groups: Sequence[types_pb2.GroupHypers] = ()

    def next(self, epoch: int, last: bool) -> Item | None:
        """The slice to compute now; waits for versions while there is none."""
        while True:
            self._look()
            step = self._schedule.step(self._engine.version)
            if step.epoch > epoch:
                return None
            if (item := self._slice()) is not None:
                self._speed.begun(time.monotonic())
                return item
            if self._wait_for_next():
                return None

    def _slice(self) -> Item | None:
        """The slice that this worker was given, else the first of its range that is not done, if it may begin that."""
        if self._given is None:
            mine = next(self._mine(), None)
            if mine is None or not self._asks():
                return None if mine is None else self._item(self._version, mine)
            reply = self._engine.ask_for_work(self._thief, self._question())
            if reply is None:  # as if nobody else were there
                return self._item(self._version, mine)
            self._hurry = self._given_away = True
            self._release()
            self._send()
            if not reply.HasField("slice"):
                return None
            self._given = reply.slice
        position, self._given = self._given, None
        if position in self._done:
            return None
        unplanned = position in self._left or not self._range[0] <= position < self._range[1]
        self._left.update(p for p in self._mine() if unplanned or p < position)
        return self._item(self._version, position, unplanned)

    def _asks(self) -> bool:
        """Whether to ask before a slice of the own range is begun."""
        now, first = time.monotonic(), not self._done
        return self._moves and (self._given_away or self._speed.asks(now, first))

    @property
    def _moves(self) -> bool:
        """Whether slices may go from one worker to another within a step."""
        return self._engine.named_by_data and not self._engine.outgoing.keeps

    def _mine(self) -> Iterator[int]:
        """The slices of the own range that are still to be computed here."""
        return (p for p in range(*self._range) if p not in self._done and p not in self._left)

    def _item(self, version: int, position: int, unplanned: bool = False) -> Item:
        step = self._schedule.step(version)
        name = SyncName(version, position, position + 1, len(step.slices))
        return Item(name, step.epoch, step.slices[position], unplanned)

    def expects(self, item: Item) -> bool:
        """It is of the present step, and not handed in."""
        name = item.name
        if not isinstance(name, SyncName) or name.step != self._engine.version:
            return False
        return name.step != self._version or name.lo not in self._done

    def alone(self, item: Item) -> bool:
        """Whether the slice is all that this worker has in this step: what it yields is pushed as it is."""
        name = item.name
        return isinstance(name, SyncName) and self._range == (name.lo, name.hi) and not self._given_away

    def ahead(self, epoch: int) -> Iterator[Item]:
        """This worker's ranges of this step and the following ones; slices that others have taken are left out."""
        version, position = self._version, 0
        while True:
            if version < self._version:
                version, position = self._version, 0
            step = self._schedule.step(version)
            if step.epoch > epoch:
                return
            # The membership may have changed since this step's range was taken, and is looked at with the next slice.
            rank, workers = self._engine.place()
            lo, hi = self._range if version == self._version else self._share(len(step.slices), rank, workers)
            if rank < 0 and version != self._version:
                return
            past = self._done | self._left if version == self._version else ()
            coming = next((p for p in range(max(lo, position), hi) if p not in past), None)
            if coming is None:
                version, position = version + 1, 0
            else:
                position = coming + 1
                yield self._item(version, coming)

    def _look(self) -> None:
        """Take in a new version or a new membership."""
        generation, (rank, workers) = self._engine.generation, self._engine.place()
        if self._version != self._engine.version:
            lost = sum(self._range[0] <= slice_ < self._range[1] for slice_ in self._engine.taken)
            self._speed.step(time.monotonic(), lost, max(1, self._engine.version - self._version))
            self._version = self._engine.version
            self._of = len(self._schedule.step(self._version).slices)
            self._done.clear()
            self._given, self._given_away, self._hurry = None, False, self._speed.slow
            for partial in self._held.values():  # others have finished the step meanwhile
                self._engine.pool.give(partial)
            self._held.clear()
        elif generation == self._generation:
            return
        else:
            self._release()
            self._send()
        self._generation, self._place, self._workers = generation, rank, workers
        self._engine.links.workers = workers
        self._left.clear()
        self._range = self._share(self._of, rank, workers)
        self._engine.keep_residuals(range(*self._range))
        self._reducer = Reducer(self._of, self._range)

    def _share(self, of: int, rank: int, workers: int) -> tuple[int, int]:
        """The range of a step of ``of`` slices that a worker computes."""
        if rank < 0:
            return 0, 0
        if self._engine.outgoing.keeps:
            return fixed_share(of, self._schedule.slices_per_step, rank, workers)
        return assign(of, workers)[rank]

    def _release(self) -> None:
        """Have what is held for merging sent as it is."""
        for (lo, hi), partial in sorted(self._held.items()):
            self._push(lo, hi, partial)
        self._held.clear()

    def contribute(self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Sum with its neighbours as far as the fixed tree allows; push what is as large as it will get."""
        assert isinstance(item.name, SyncName)
        self._speed.finished(time.monotonic() - self._engine.stalled_s)
        self._groups = groups
        self._look()
        name = item.name
        if name.step != self._version or name.lo in self._done:
            self._engine.discard(partial)
            if not self._engine.named_by_data:
                self._engine.handed.passed_over()
            return self._engine.named_by_data
        self._done.add(name.lo)
        counted = True
        if not self._engine.named_by_data:
            counted = self._engine.wait_all([self._push_one(name, partial)])
        elif self._hurry or self._engine.outgoing.lossy or not self._range[0] <= name.lo < self._range[1]:
            self._push(name.lo, name.hi, partial)
        else:
            self._merge((name.lo, name.hi), partial)
        if next(self._mine(), None) is not None:
            self._send()
            return counted
        # Neighbours that were handed in before the membership changed never come to be merged with.
        self._release()
        began = time.monotonic()
        if not self._exchange():
            self._send()
            self._wait_for_next(time.monotonic() - began)
        return counted

    def _exchange(self) -> bool:
        """Push what is left and have the next version with it; False if that has not come about in time."""
        if self._pushes or len(self._unsent) != 1:
            return False
        name, partial = self._unsent[0]
        patience_s = self._speed.patience_s() if self._moves else math.inf
        self._engine.links.assignment = self._assignment() if self._moves else None
        done = self._engine.exchange(name, partial, self._groups, patience_s)
        if done is not None:
            self._unsent.clear()
        return bool(done)

    def _merge(self, where: TreeNode, partial: PartialSum) -> None:
        assert self._reducer is not None
        self._reducer.add(where)
        self._held[where] = partial
        for left, right, whole in self._reducer.merge():
            merged, absorbed = self._held.pop(left), self._held.pop(right)
            merged.absorb(absorbed)
            self._engine.pool.give(absorbed)
            self._held[whole] = merged
        for where in cover(*self._range, self._of):
            if where in self._held:
                self._push(*where, self._held.pop(where))

    def _push(self, lo: int, hi: int, partial: PartialSum) -> None:
        self._unsent.append((SyncName(self._version, lo, hi, self._of), partial))

    def _send(self) -> None:
        """Begin to bring what is to be pushed."""
        unsent, self._unsent = self._unsent, []
        self._pushes += [self._push_one(name, partial) for name, partial in unsent]

    def _push_one(self, name: SyncName, partial: PartialSum) -> concurrent.futures.Future[frozenset[shard_pb2.Outcome]]:
        outgoing = self._engine.outgoing
        flush = outgoing.keeps and flushes(self._schedule, name.step, name.lo, outgoing.wire.flush_every)
        return self._engine.push(name, partial, self._groups, clock=0, flush=flush)

    def _wait_for_next(self, waited_s: float = 0.0) -> bool:
        """Wait for the next version, for a slice to compute, or another membership; True if the mode has changed.

        ``waited_s``: so long it has been waited for already.
        """
        # Asked for beside the pushes: it is answered when all of the step has come.
        if not self._moves:
            pulling = self._engine.begin_pull(self._version + 1)
            try:
                self.finish()
            except BaseException:
                pulling.cancel()
                raise
            self._engine.advance(self._version + 1, self._generation, pulling)
            return self._engine.mode_changed()
        self._engine.links.assignment = self._assignment()
        pulling = self._engine.begin_pull(self._version + 1)
        own = next((p for p in range(*self._range) if p not in self._done), None)
        waiting = self._thief.wait(pulling, self._pushes, self._question(), own, self._speed, waited_s)
        self._given = self._engine.advance(self._version + 1, self._generation, pulling, waiting)
        self.finish()
        if self._given is not None:
            self._hurry = self._given_away = True
        return self._engine.mode_changed()

    def _assignment(self) -> shard_pb2.Assignment:
        """What servers are told of this worker."""
        return shard_pb2.Assignment(place=self._place, workers=self._workers, work_s=self._speed.work_s)

    def _question(self) -> shard_pb2.StealRequest:
        """What server 0 has to know to say which slice this worker should compute."""
        finished = RangeSet.from_ranges((p, p + 1) for p in self._done)
        return shard_pb2.StealRequest(
            step=self._version,
            of=self._of,
            assignment=self._assignment(),
            finished=[types_pb2.Range(start=lo, stop=hi) for lo, hi in finished.ranges()],
        )

    @property
    def unsent(self) -> int:
        """Slices handed in that wait for others of their step, to be sent as one."""
        return sum(hi - lo for lo, hi in list(self._held)) + sum(name.slices for name, _ in list(self._unsent))

    def finish(self) -> None:
        """Wait until everything handed in has arrived."""
        self._release()
        self._send()
        self._engine.wait_all(self._pushes)
        self._pushes.clear()
