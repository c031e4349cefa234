"""Small messages to servers: this worker is idle; which slice should this worker compute?"""

from __future__ import annotations

import asyncio
from typing import cast

import structlog

from paramserver import errors
from paramserver.v1 import shard_pb2
from paramserver.worker.links.near import Near
from paramserver.worker.links.targets import Targets

log = structlog.get_logger("paramserver.worker")

_STEAL_S = 2.0


class Questions:
    """Messages beside pushes and pulls."""

    def __init__(self, targets: Targets, near: Near) -> None:
        self._targets, self._near = targets, near

    async def idle(self) -> None:
        """Tell every shard that this worker has nothing to do."""
        targets = self._targets
        request = shard_pb2.IdleRequest(job=targets.job, timeline=targets.timeline, worker=targets.worker())

        async def one(shard: int) -> None:
            await targets.persist(
                shard,
                "to say that this worker is idle",
                lambda timeout_s: targets.channels[shard].call("Shard.Idle", request, timeout=timeout_s),
            )

        await asyncio.gather(*(one(shard) for shard in range(len(targets))))

    async def steal(self, shard: int, request: shard_pb2.StealRequest) -> shard_pb2.StealResponse | None:
        """Ask a server for a slice of the open step; None if it does not answer."""
        targets = self._targets
        request.job, request.timeline, request.worker = targets.job, targets.timeline, targets.worker()
        try:
            reply = await self._near.way(shard).call("Shard.Steal", request, timeout=_STEAL_S)
        except errors.ParamServerError as error:
            log.debug("no answer to a question for work", error=str(error))
            return None
        return cast(shard_pb2.StealResponse, reply)
