"""Push and pull in one, for workers whose gradients and weights lie in shared memory."""

from __future__ import annotations

import time

from paramserver import errors
from paramserver.failpoints import reach
from paramserver.server.rpc.contributions import Contributions, contribution_of
from paramserver.server.rpc.pulls import Pulls
from paramserver.v1 import shard_pb2


class Exchanges(Contributions, Pulls):
    """A step of a worker with one call."""

    async def exchange(self, request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
        """Count a contribution, once, then answer with the header of a version as a pull does."""
        self.used_at = time.monotonic()
        shard, header = self._ready(), request.push
        reach("push.recv", header.base_version)
        try:
            used = self._checked_used(header, shard)
            if not (header.HasField("shared") and header.shared.checked):
                raise errors.ProtocolError("gradients that do not lie in shared memory, or are not checked, are pushed")
            pulling = self._pulling(request.pull)
            with self.intake.receiving(shard.queued, shard.nbytes):
                needed = shard.tensors.chunks_used(used)
                lying = shard.sharing.contribution(header.shared, header.worker, needed)
                contribution = contribution_of(header, lying, shard, used)
        except errors.ProtocolError:
            self._refused += 1
            raise
        self._pushed += sum(tensor.nbytes for tensor in lying.values())
        pushed = await self._count(shard, contribution, header)
        pulled = await shard.pull(pulling.ask, request.pull.wait_s)
        answer, _ = await self._header(pulling, request.pull, pulled)
        return shard_pb2.ExchangeResponse(pushed=pushed, pulled=answer)
