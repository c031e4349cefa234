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
        # Whether this worker has said that it is idle, and has not asked for weights at a clock since.
        self._idle = False
        # Says so to shards that have moved.
        self._telling: set[asyncio.Task[None]] = set()

    async def idle(self) -> None:
        """Tell every shard that this worker has nothing to do."""
        self._idle = True
        await asyncio.gather(*(self._say_idle(shard) for shard in range(len(self._targets))))

    async def _say_idle(self, shard: int) -> None:
        targets = self._targets
        request = shard_pb2.IdleRequest(job=targets.job, timeline=targets.timeline, worker=targets.worker())

        async def attempt(timeout_s: float) -> None:
            channel = targets.channels[shard]
            await channel.call("Shard.Idle", request, timeout=timeout_s)
            targets.still(shard, channel)

        await targets.persist(shard, "to say that this worker is idle", attempt)

    def moved(self, shard: int) -> None:
        """Another server has this shard, and may believe that this worker is at work: tell it if it is not."""
        if self._idle:
            telling = self._targets.beside(self._tell_again(shard))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell_again(self, shard: int) -> None:
        try:
            await self._say_idle(shard)
        except errors.ParamServerError as error:
            log.info("a server was not told that this worker is idle", shard=shard, reason=str(error))

    async def at_work(self) -> None:
        """This worker is about to ask for weights at a clock. No shard hears after this that the worker is idle."""
        self._idle = False
        if self._telling:
            await asyncio.wait(self._telling, timeout=self._targets.wait_timeout_s)

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
