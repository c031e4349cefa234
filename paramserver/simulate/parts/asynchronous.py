"""A simulated asynchronous worker: the loop of `worker.pace.AsyncPace`, with the real leases."""

from __future__ import annotations

from collections import deque

from paramserver.core.versions.events import AtClock, Joining, Want
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import LEASE_AHEAD, LEASE_LOW, SliceLeases
from paramserver.simulate.machinery.blame import Part, longer
from paramserver.simulate.machinery.clock import Process, Signal
from paramserver.simulate.parts.member import Member


class AsyncWorker:
    """Leased slices, one after the other, as fast as the staleness bound allows."""

    def __init__(self, member: Member, leases: SliceLeases, workers: int, early: bool = False) -> None:
        """``early``: a contribution leaves while it is computed, from the second contribution on."""
        self._member, self._leases, self._workers, self._early = member, leases, workers, early
        self._queue: deque[AsyncName] = deque()
        self._done: list[AsyncName] = []
        self._clock: int | None = None

    def run(self) -> Process[None]:
        """Work without end."""
        member = self._member
        pending: Signal[list[AsyncName]] | None = None
        early = False  # the first contribution shows which tensors have gradients
        yield from self._pull()
        while True:
            if not self._queue:
                began_at = member.clock.now
                self._queue.extend((yield pending or self._lease()))
                pending = None
                member.chain = longer(member.chain, Part.CALLS, member.clock.now - began_at)
            name = self._queue[0]
            assert self._clock is not None
            pushes = member.begin(name, self._clock)
            yield from member.compute(pushes if early else ())
            early = self._early
            if len(self._queue) <= LEASE_LOW and pending is None:
                pending = self._lease()
            yield from member.wait_all([member.complete(pushes)])
            self._queue.popleft()
            self._done.append(name)
            self._clock += 1
            yield from self._pull()

    def _lease(self) -> Signal[list[AsyncName]]:
        """Report the slices that are done and ask the coordinator for more."""
        done, self._done = self._done, []
        answer: Signal[list[AsyncName]] = Signal()

        def asked() -> None:
            self._leases.complete(done)
            answer.set(self._leases.lease(self._member.ident, 0, LEASE_AHEAD, self._workers))

        self._member.clock.after(self._member.call_s, asked)
        return answer

    def _pull(self) -> Process[None]:
        """Pull for the present clock. A new worker takes the highest of the servers' slowest clocks, and reports it."""
        while True:
            want: Want = Joining() if self._clock is None else AtClock(self._clock)
            answers = yield from self._member.pull(want)
            slowest = max(answer.min_clock for answer in answers)
            if self._clock is not None and slowest <= self._clock:
                return
            self._clock = slowest
