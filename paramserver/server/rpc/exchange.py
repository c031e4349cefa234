"""Push and pull in one, for workers whose gradients and weights lie in shared memory."""

from __future__ import annotations

from paramserver.server.rpc.contributions import Contributions
from paramserver.server.rpc.pulls import Pulls
from paramserver.v1 import shard_pb2


class Exchanges:
    """A step of a worker with one call."""

    def __init__(self, contributions: Contributions, pulls: Pulls) -> None:
        self._contributions, self._pulls = contributions, pulls

    async def exchange(self, request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
        """Count a contribution, once, then answer with the header of a version as a pull does."""
        with self._contributions.checking():
            shard, contribution = self._contributions.in_memory(request.push)
            pulling = self._pulls.checked(request.pull)
        nbytes = sum(tensor.nbytes for tensor in contribution.chunks.values())
        pushed = await self._contributions.count(shard, contribution, request.push, nbytes)
        pulled = await shard.pull(pulling.ask, request.pull.wait_s)
        answer, _ = await self._pulls.header(pulling, request.pull, pulled)
        return shard_pb2.ExchangeResponse(pushed=pushed, pulled=answer)
