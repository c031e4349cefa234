"""Asynchronous: leased slices, one after the other, as fast as the staleness bound allows."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Iterator, Sequence

from paramserver import errors
from paramserver.core.versions.events import AtClock, Joining, Want
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import LEASE_AHEAD, LEASE_LOW
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.flat import PartialSum
from paramserver.worker.gradients.sender import Sender
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.phases import WAIT
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.links.pulls import Pull
from paramserver.worker.pace.item import Item
from paramserver.worker.weights.weights import Weights

_PARK_S = 2.0
# A worker asks again after so long while the mode is about to change: another worker may have given slices back.
_PAUSE_S = 0.2


class AsyncPace:
    """Asynchronous: leased slices, one after the other, as fast as the staleness bound allows."""

    def __init__(
        self, member: Member, modes: Modes, shards: Shards, slices: Slices, weights: Weights, sender: Sender
    ) -> None:
        self._member, self._modes, self._shards = member, modes, shards
        self._slices, self._weights, self._sender = slices, weights, sender
        self._queue: deque[AsyncName] = deque()
        self._popped = 0  # how many slices have left the queue at its head, ever
        self._done: list[AsyncName] = []
        self._pending: concurrent.futures.Future[coordinator_pb2.LeaseResponse] | None = None
        self._clock: int | None = None  # None: joins at the slowest clock
        self._fresh = False  # the weights are those for the present clock
        self._finished = False

    @property
    def clock(self) -> int:
        """How many slices this worker has finished, counted from where it joined."""
        return self._clock or 0

    @property
    def joined(self) -> bool:
        """Whether this worker has a clock. A newcomer, and a worker that was idle, begins at the slowest one."""
        return self._clock is not None

    @property
    def holding(self) -> list[AsyncName]:
        """The slices that are leased and not handed in."""
        return list(self._queue)

    def next(self, epoch: int, last: bool) -> Item | None:
        """The oldest leased slice; leases more if there is none, and waits if other workers hold all other slices."""
        wait_s = 0.0
        while not self._queue:
            if self._modes.changed():
                self._rest()
                return None
            reply = self._fetch(epoch, last, wait_s)
            if reply is None or reply.slices:
                continue
            if reply.paused or reply.finished or wait_s == 0.0:
                self._rest()
            if reply.finished:
                return None
            if reply.paused and not self._modes.await_revision(_PAUSE_S):
                continue
            self._member.waits_for(reply.waiting_for)
            wait_s = _PARK_S
        self._member.waits_for("")
        if not self._fresh:
            self._pull()
        name = self._queue[0]
        return Item(name, name.epoch, name.index)

    def expects(self, item: Item) -> bool:
        """Whether the item is the oldest leased slice, and the weights at hand are for this slice."""
        return bool(self._queue) and self._queue[0] == item.name and self._fresh

    def alone(self, item: Item) -> bool:
        """Every slice is pushed by itself."""
        return True

    def refresh(self) -> None:
        """Pull other weights before the next slice."""
        self._fresh = False

    def _rest(self) -> None:
        """There is nothing to do for now: no worker waits for this worker, which comes back at the slowest clock."""
        self._clock, self._fresh = None, False
        self._slices.idle()

    def _fetch(self, epoch: int, last: bool, wait_s: float) -> coordinator_pb2.LeaseResponse | None:
        """Lease more slices. None: an earlier request was answered, which does not say how many slices are left."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._queue.extend(AsyncName(name.epoch, name.index) for name in self._member.wait(pending).slices)
            return None
        reply = self._member.wait(self._lease(epoch, last, wait_s))
        self._queue.extend(AsyncName(name.epoch, name.index) for name in reply.slices)
        return reply

    def _lease(self, epoch: int, last: bool, wait_s: float) -> concurrent.futures.Future[coordinator_pb2.LeaseResponse]:
        done, self._done = self._done, []
        return self._slices.lease(epoch, last, LEASE_AHEAD, done, wait_s, self.holding)

    def ahead(self, epoch: int) -> Iterator[Item]:
        """The leased slices, and as many more as the data loader asks for."""
        position = self._popped
        while True:
            position = max(position, self._popped)
            if position - self._popped >= len(self._queue):
                if self._finished or self._modes.changed():
                    return
                while (reply := self._fetch(epoch, False, 0.0)) is None:
                    pass
                if not reply.slices:
                    return
            name = self._queue[position - self._popped]
            position += 1
            yield Item(name, name.epoch, name.index)

    def contribute(self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Push the slice, count one clock on, and wait until the bound allows the next one."""
        assert isinstance(item.name, AsyncName)
        assert self._queue, "a slice was leased before it is handed in"
        assert self._queue[0] == item.name, "slices are handed in as they were handed out"
        if len(self._queue) <= LEASE_LOW and self._pending is None:
            self._pending = self._lease(item.epoch, False, 0.0)
        counted = self._sender.wait_all([self._sender.push(item.name, partial, groups, self.clock, flush=False)])
        self._queue.popleft()
        self._popped += 1
        self._done.append(item.name)
        self._clock = self.clock + 1
        self._pull()
        return counted

    def _pull(self) -> None:
        """Pull for the present clock. A newcomer takes the highest of the shards' slowest clocks, and says so."""
        former = self._member.phases.enter(WAIT)
        try:
            self._pull_at_clock()
        finally:
            self._member.phases.enter(former)

    def _pull_at_clock(self) -> None:
        while True:
            want: Want = Joining() if self._clock is None else AtClock(self._clock)
            self._weights.end_copy()
            try:
                pull = Pull(want, begin=self._weights.may_begin)
                results = self._member.do(self._shards.links.pulls.ask(pull))
            except errors.FencedError:
                raise
            except errors.StaleViewError:  # the mode has changed meanwhile
                self._modes.await_revision(self._member.wait_timeout_s)
                return
            self._weights.install(results)
            min_clock = max(result.min_clock for result in results)
            if self._clock is not None and min_clock <= self._clock:
                self._fresh = True
                return
            self._clock = min_clock

    def finish(self) -> None:
        """Report finished slices and lease no more. The other slices go back when this worker leaves or asks again."""
        self._finished = True
        if self._pending is not None:
            self._member.wait(self._pending)
            self._pending = None
        if self._done:
            done, self._done = self._done, []
            self._member.wait(self._slices.lease(done=done))
