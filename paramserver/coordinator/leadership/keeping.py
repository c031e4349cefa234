"""Telling servers which workers there are, together with the job's record, which they keep.

A coordinator that finds the store empty goes on from the newest record that a server has. It is told in the background
to each server that has its part of the model.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.journal import Journal
from paramserver.core.job.membership import Role
from paramserver.v1 import shard_pb2, types_pb2

log = structlog.get_logger("paramserver.coordinator")

_RETRY_S = 0.5
_SETTLE_S = 2.0
_LOOK_S = 0.01


class _Registry(Protocol):
    """See `coordinator.model`."""

    model: types_pb2.ModelSpec | None
    configured: bool


class _Job(ports.Stage, ports.Commands, ports.Ends, Protocol):
    journal: Journal

    @property
    def registry(self) -> _Registry: ...

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def given_up(self) -> bool: ...

    def worker_infos(self) -> list[types_pb2.WorkerInfo]: ...


class Keeping:
    """Remembers which server has heard of which edition of the record."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        # By member number.
        self._told: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._telling = asyncio.Lock()

    async def spread(self) -> None:
        """The workers have changed: tell all servers, if need be several times in the background."""
        job = self._job
        # While the job goes back, servers hear of the workers when they are set up again.
        if job.registry.model is not None and not job.recovery.under_way:
            await self.insist()

    async def insist(self) -> None:
        """Tell all servers; if that fails, try again in the background until all have answered."""
        if not await self.tell():
            self._job.tasks.begin(self._tell_again())

    async def tell(self) -> bool:
        """Tell all servers which workers there are; False if some server did not hear of it."""
        job = self._job
        async with self._telling:
            record = job.journal.record_now
            servers = [server.ident for server in job.members.of(Role.SERVER)]
            request = shard_pb2.SetMembersRequest(
                job=job.options.job,
                generation=job.members.generation,
                timeline=job.timeline,
                workers=job.worker_infos(),
                term=job.term,
                record=record.SerializeToString(),
            )
            try:
                await job.ask_servers("Shard.SetMembers", request, shard_pb2.SetMembersResponse, present=True)
            except errors.FencedError as error:
                await job.replaced(str(error))
                return True
            except errors.ParamServerError as error:
                if job.members.of(Role.WORKER):  # else the job is over, and servers leave in any order
                    log.warning("a server did not hear of the new membership", error=str(error))
                return False
            for ident in servers:
                self._told[ident] = max(record.edition, self._told.get(ident, 0))
        return True

    async def _tell_again(self) -> None:
        """A shard that still counts a dead worker would hold the others back."""
        while self._job.members.of(Role.WORKER) and self._job.state != types_pb2.JOB_STATE_FAILED:
            await asyncio.sleep(_RETRY_S)
            if await self.tell():
                return

    def wake(self) -> None:
        """Tell servers the newest record in the background, if some of them lack it."""
        if self.behind() and (self._task is None or self._task.done()):
            self._task = self._job.tasks.begin(self._catch_up())

    def behind(self) -> bool:
        """Whether some server lacks the newest record. A server that is set up anew hears of it with that."""
        job = self._job
        if not job.registry.configured or job.recovery.under_way or job.given_up:
            return False
        edition = job.journal.record_now.edition
        return any(self._told.get(server.ident, 0) < edition for server in job.members.of(Role.SERVER))

    async def _catch_up(self) -> None:
        while self.behind():
            if not await self.tell():
                await asyncio.sleep(_RETRY_S)

    async def settled(self) -> None:
        """Wait until another coordinator would know the newest record, from the store or from servers; 2 s at most."""
        await asyncio.gather(self._job.journal.settled(), self._servers_settled())

    async def _servers_settled(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while self.behind() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
