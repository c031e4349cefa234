"""Asynchronous mode: leasing slices to workers. A worker for which there is no slice just now waits here."""

from __future__ import annotations

import asyncio

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.core.job.membership import Role
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import SliceLeases
from paramserver.core.work.slices import DataSpec
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.bounds import patience

_MAX_WAIT_S = 60.0
_MAX_WANT = 1024


class Leasing:
    """The slice leases of the job; ``table`` is None while the job is synchronous or has no data yet."""

    def __init__(self, job: ports.Stage) -> None:
        self._job = job
        self.table: SliceLeases | None = None
        self._changed = asyncio.Condition()
        # The revision of the setting under which each worker last asked for slices.
        self._revisions: dict[int, int] = {}

    async def register(self, data: DataSpec) -> None:
        """In asynchronous mode, make a lease table for this data set."""
        # A table made before the data was known has leased no slice.
        fits = self.table is not None and self.table.slices_per_epoch == data.slices_per_epoch
        if self._job.consistency.mode is Mode.ASYNC and not fits:
            await self.begin(SliceLeases(data.slices_per_epoch))

    async def begin(self, table: SliceLeases | None) -> None:
        """Lease slices of this table from now on; None: lease none, the job is synchronous."""
        self.table = table
        await self.notify()

    async def notify(self) -> None:
        """Let parked requests look again."""
        async with self._changed:
            self._changed.notify_all()

    def give_back(self, worker: int) -> None:
        """The slices of a worker that is gone, or has begun anew, go to other workers."""
        self._revisions.pop(worker, None)
        if self.table is not None and self.table.give_back(worker):
            self._job.tasks.begin(self.notify())

    async def lease(self, request: coordinator_pb2.LeaseRequest) -> coordinator_pb2.LeaseResponse:
        """Note the slices that are done, then lease up to ``want`` slices. Waits up to ``wait_s`` for the first."""
        self._check(request)
        wait_s = patience("wait_s", request.wait_s, _MAX_WAIT_S)
        if self.table is not None and request.done:
            reach("slice.before_done")
            self.table.complete(AsyncName(name.epoch, name.index) for name in request.done)
            await self.notify()
        if request.revision > self._revisions.get(request.member, request.revision) + 1:
            # The worker cannot tell whether the job was synchronous meanwhile, so it has dropped its leases.
            self.give_back(request.member)
        self._revisions[request.member] = request.revision
        if self.table is not None and request.revision == self._job.consistency.revision:
            holding = (AsyncName(name.epoch, name.index) for name in request.holding)
            if self.table.reconcile(request.member, holding):
                await self.notify()
        response = coordinator_pb2.LeaseResponse()
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._fill(request, response))
        except TimeoutError:
            response.waiting_for = self._waiting_for(request.max_epoch)
        if response.slices:
            reach("slice.leased")
        return response

    def _check(self, request: coordinator_pb2.LeaseRequest) -> None:
        if request.timeline != self._job.timeline:
            raise errors.RolledBackError(f"the job is on timeline {self._job.timeline} now")

    def _fill(self, request: coordinator_pb2.LeaseRequest, response: coordinator_pb2.LeaseResponse) -> bool:
        self._check(request)
        present = self._job.consistency.revision
        if self.table is not None:
            response.open_epoch, _ = self.table.position()
        if request.revision < present:
            response.paused = True
            return True
        if request.want == 0:
            return True
        # A worker can learn of asynchronous mode from the shards before the table is made.
        table = self.table if request.revision == present else None
        if table is None:
            return False
        workers = len(self._job.members.of(Role.WORKER))
        names = table.lease(request.member, request.max_epoch, min(request.want, _MAX_WANT), workers)
        response.slices.extend(shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in names)
        if names:
            return True
        if table.paused:
            response.paused = True
            return True
        response.finished = (
            table.finished(request.max_epoch) if request.last_epoch else table.nothing_left(request.max_epoch)
        )
        return response.finished

    def _waiting_for(self, max_epoch: int) -> str:
        if self.table is None:
            return "the change to asynchronous mode"
        names = {m.ident: m.name for m in self._job.members.of(Role.WORKER)}
        held = self.table.holders(max_epoch)
        return ", ".join(f"{names.get(ident, f'worker {ident}')} ({n} slices)" for ident, n in sorted(held.items()))

    async def drain(self) -> None:
        """Lease no more slices, and wait until all leased slices are done. Cancel to give up."""
        assert self.table is not None
        self.table.paused = True
        await self.notify()
        async with self._changed:
            await self._changed.wait_for(lambda: self.table is None or self.table.drained())

    async def resume(self) -> None:
        """Lease slices again, after a drain that was given up."""
        if self.table is not None:
            self.table.paused = False
        await self.notify()
