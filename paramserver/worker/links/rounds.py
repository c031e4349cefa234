"""Sums over the slices of a step: each slice brings numbers to a round at one server, and gets the sum of the round."""

from __future__ import annotations

from contextlib import aclosing

import structlog

from paramserver import errors
from paramserver.tensors.codec import split_frame
from paramserver.v1 import shard_pb2
from paramserver.worker.links.targets import Targets

log = structlog.get_logger("paramserver.worker")

# An answer needs so long at most after the last slice has come.
_SLACK_S = 60.0


class Rounds:
    """Brings the numbers of this worker's slices. A server adds them up in the order of the slices."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        # What was brought in the present step, by shard and round: a shard that moves to another server gets all of it
        # again.
        self._step, self._brought = -1, dict[int, dict[tuple[int, str, int], shard_pb2.CollectRequest]]()

    async def bring(self, step: int, shard: int, request: shard_pb2.CollectRequest) -> bytes | tuple[int, ...]:
        """The sum of the round; or the missing slices, after ``wait_s`` seconds, or at once if one is in ``mine``.

        Raises StaleViewError if the job has gone back, or if the step is over. Raises UserError if slices disagree.
        """
        request.job, request.timeline = self._targets.job, self._targets.timeline
        if step != self._step:
            self._step, self._brought = step, {}
        again = shard_pb2.CollectRequest()
        again.CopyFrom(request)
        again.takes, again.wait_s = False, 0.0
        self._brought.setdefault(shard, {})[request.rank, request.channel, request.number] = again
        return await self._targets.persist(shard, f"to get {request.what}", lambda _: self._bring(shard, request))

    async def _bring(self, shard: int, request: shard_pb2.CollectRequest) -> bytes | tuple[int, ...]:
        channel = self._targets.channels[shard]
        limit_s = request.wait_s + _SLACK_S
        async with aclosing(channel.download("Shard.Collect", request, timeout=limit_s)) as frames:
            async for raw in frames:
                header, parts = split_frame(raw)
                return tuple(header.missing) if header.missing else bytes(parts[0][1]) if parts else ()
        if request.takes:
            raise errors.ProtocolError(f"{request.what}: the server has sent no sum")
        return ()

    def moved(self, shard: int) -> None:
        """Another server has this shard, and does not know what was brought to the former one."""
        for request in self._brought.get(shard, {}).values():
            self._targets.beside(self._again(shard, request))

    async def _again(self, shard: int, request: shard_pb2.CollectRequest) -> None:
        try:
            await self._targets.persist(shard, f"to bring {request.what} again", lambda _: self._bring(shard, request))
        except errors.ParamServerError as error:
            log.info("a server was not told what it needs for a sum", what=request.what, reason=str(error))
