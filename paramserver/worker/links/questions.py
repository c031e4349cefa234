"""Small messages to servers: this worker is idle; which slice should this worker compute?"""

from __future__ import annotations

import asyncio
from typing import cast

import structlog

from paramserver import errors
from paramserver.v1 import shard_pb2
from paramserver.worker.links.near import Near
from paramserver.worker.links.servers import Servers

log = structlog.get_logger("paramserver.worker")

_STEAL_S = 2.0


class Questions:
    """Messages beside pushes and pulls."""

    def __init__(self, servers: Servers, near: Near) -> None:
        self._servers, self._near = servers, near

    async def idle(self) -> None:
        """Tell every shard that this worker has nothing to do."""
        servers = self._servers
        request = shard_pb2.IdleRequest(job=servers.job, timeline=servers.timeline, worker=servers.worker())

        async def one(server: int) -> None:
            await servers.persist(
                server,
                "to say that this worker is idle",
                lambda timeout_s: servers.channels[server].call("Shard.Idle", request, timeout=timeout_s),
            )

        await asyncio.gather(*(one(server) for server in range(len(servers))))

    async def steal(self, server: int, request: shard_pb2.StealRequest) -> shard_pb2.StealResponse | None:
        """Ask a server for a slice of the open step; None if it does not answer."""
        servers = self._servers
        request.job, request.timeline, request.worker = servers.job, servers.timeline, servers.worker()
        try:
            reply = await self._near.way(server).call("Shard.Steal", request, timeout=_STEAL_S)
        except errors.ParamServerError as error:
            log.debug("no answer to a question for work", error=str(error))
            return None
        return cast(shard_pb2.StealResponse, reply)
