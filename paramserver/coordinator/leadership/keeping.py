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
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.members import for_servers
from paramserver.core.job.membership import Member, Role
from paramserver.v1 import shard_pb2, types_pb2

log = structlog.get_logger("paramserver.coordinator")

_RETRY_S = 0.5
_SETTLE_S = 2.0
_LOOK_S = 0.01


class _Registry(Protocol):
    """See `coordinator.model`."""

    model: types_pb2.ModelSpec | None
    configured: bool


class _Job(ports.Stage, ports.Ends, ports.Holding, Protocol):
    journal: Journal
    servers: Servers
    term: int

    @property
    def registry(self) -> _Registry: ...

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def resizing(self) -> ports.Resizing: ...

    @property
    def given_up(self) -> bool: ...

    def worker_infos(self) -> list[types_pb2.WorkerInfo]: ...


class Keeping:
    """Remembers which server has heard of which edition of the record. A slow server holds no other server up."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        # By member number.
        self._told: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # The newest message to servers, and the generation, timeline and edition for which it was made.
        self._request = shard_pb2.SetMembersRequest()
        self._numbers = (-1, -1, -1)

    async def tell(self) -> bool:
        """Tell all servers which workers there are; False if some server did not hear of it."""
        servers = self._job.members.of(Role.SERVER)
        return all(await asyncio.gather(*(self._tell(server) for server in servers)))

    def _news(self) -> shard_pb2.SetMembersRequest:
        """The newest workers and record. The message is made once for all servers."""
        job = self._job
        record = job.journal.record_now
        numbers = (job.members.generation, job.timeline, record.edition)
        if numbers != self._numbers:
            self._numbers = numbers
            self._request = shard_pb2.SetMembersRequest(
                job=job.options.job,
                generation=job.members.generation,
                timeline=job.timeline,
                workers=job.worker_infos(),
                term=job.term,
                record=for_servers(record),
                plan=job.resizing.plan,
                settled=job.resizing.settled,
            )
        return self._request

    async def _tell(self, server: Member) -> bool:
        job = self._job
        request, edition = self._news(), job.journal.record_now.edition
        try:
            places = job.holders.copies(server)
            await job.servers.call_all(
                places, "Shard.SetMembers", request, shard_pb2.SetMembersResponse, job.options.call_timeout_s
            )
        except errors.FencedError as error:
            await job.replaced(str(error))
            return True
        except errors.ParamServerError as error:
            if job.members.of(Role.WORKER):  # else the job is over, and servers leave in any order
                log.warning("a server did not hear of the new membership", error=str(error))
            return False
        self._told[server.ident] = max(edition, self._told.get(server.ident, 0))
        return True

    def wake(self) -> None:
        """Tell servers the newest record in the background, each of them until it has heard of it."""
        for server in self._job.members.of(Role.SERVER):
            task = self._tasks.get(server.ident)
            if self._lacks(server) and (task is None or task.done()):
                self._tasks[server.ident] = self._job.tasks.begin(self._catch_up(server))

    def forget(self, ident: int) -> None:
        """This server is no longer a member."""
        self._told.pop(ident, None)
        self._tasks.pop(ident, None)

    def behind(self) -> bool:
        """Whether some server lacks the newest record."""
        return any(self._lacks(server) for server in self._job.members.of(Role.SERVER))

    def _lacks(self, server: Member) -> bool:
        """Whether this server lacks the newest record. A server that is set up anew hears of it with that."""
        job = self._job
        if not job.registry.configured or job.recovery.under_way or job.given_up or server.ident not in job.members:
            return False
        return self._told.get(server.ident, 0) < job.journal.record_now.edition

    async def _catch_up(self, server: Member) -> None:
        """A shard that still counts a dead worker would hold the others back."""
        while self._lacks(server):
            if not await self._tell(server):
                await asyncio.sleep(_RETRY_S)

    async def settled(self) -> None:
        """Wait until another coordinator would know the newest record, from the store or from servers; 2 s at most."""
        await asyncio.gather(self._job.journal.settled(), self.servers_settled())

    async def servers_settled(self) -> None:
        """Wait until all servers have the newest record, and know the workers in it; 2 s at most."""
        deadline = time.monotonic() + _SETTLE_S
        while self.behind() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
