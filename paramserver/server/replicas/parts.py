"""Chunks of a shard of a new plan, which former shards bring while training goes on: one *part* from each of them.

A part follows its former shard as a backup does that catches up: see `following`. When all former shards stand at one
version, each part that has all of its chunks is at that version, too, and the shard is made of the parts (`filling`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence

import structlog
from torch import Tensor

from paramserver import errors
from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import Chunk, Plan
from paramserver.core.layout.replanning import sources
from paramserver.server.arithmetic.hypers import Hyperparameters
from paramserver.server.arithmetic.state import State
from paramserver.server.replicas.following import Following
from paramserver.server.team import Team
from paramserver.server.versions.shard import ShardTensors
from paramserver.tensors.hypers import groups_from_proto, optimizers_of
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.server")

# How long a former shard may take to answer, and how long to wait before it is asked again.
_ASK_S, _AGAIN_S = 10.0, 0.1


class Part:
    """The chunks that one former shard brings. ``feed``: the number that its messages bear."""

    def __init__(self, plan: Plan, chunks: Sequence[int], optimizers: Optimizers, team: Team) -> None:
        self.feed = secrets.randbits(63) | 1
        self.chunks: Mapping[int, Chunk] = {index: plan.layout.chunks[index] for index in chunks}
        self.tensors = ShardTensors(plan.layout, [*self.chunks.values()], optimizers, team)
        self.following = Following(self)
        # Messages are taken in one after the other.
        self.turn = asyncio.Lock()

    @property
    def whole(self) -> bool:
        """Whether all chunks are there."""
        return not self.following.lacks()


class Parts:
    """All parts of one shard, under one placement of the former shards. Lives in the event loop."""

    def __init__(
        self,
        job: str,
        plan: Plan,
        number: int,
        request: shard_pb2.ConfigureRequest,
        former: Plan,
        team: Team,
        connect: Callable[[str], Channel],
    ) -> None:
        """``number``: of the new ``plan``. ``former``: the plan in force."""
        filling = request.filling
        self.job, self.timeline, self.placement = job, filling.timeline, filling.placement
        self.digest = plan.layout.digest
        optimizers = optimizers_of(request.model.optimizer)
        self.hypers = Hyperparameters(optimizers, groups_from_proto(request.model.optimizer.groups))
        wanted = sources(former, plan, request.shard)
        # By former shard.
        self.parts = {source: Part(plan, chunks, optimizers, team) for source, chunks in wanted.items()}
        addresses = {source.index: source.address for source in filling.sources}
        self._tasks = [
            asyncio.create_task(self._ask(connect(addresses[source]), self._request(number, part, filling)))
            for source, part in self.parts.items()
            if source in addresses  # else it has no server just now, and another placement follows
        ]

    @property
    def whole(self) -> bool:
        """Whether all chunks are there."""
        return all(part.whole for part in self.parts.values())

    def fed(self, timeline: int, feed: int) -> Part:
        """The part to which a message belongs. Raises GoneError if there is none."""
        found = [part for part in self.parts.values() if part.feed == feed]
        if not found or timeline != self.timeline:
            raise errors.GoneError("this shard of a new plan does not want these chunks")
        return found[0]

    def at(self, source: int, version: int) -> tuple[Mapping[int, Tensor], Mapping[int, State]] | None:
        """Weights and optimizer state of a part that has all of its chunks at ``version``; None: it has not."""
        part = self.parts.get(source)
        if part is None or not part.whole or part.following.version is None:
            return None
        return (
            (part.following.version.tensors, part.tensors.states) if part.following.version.number == version else None
        )

    def close(self) -> None:
        """Take nothing in any more."""
        for task in self._tasks:
            task.cancel()
        self.parts = {}

    def _request(self, number: int, part: Part, filling: shard_pb2.Filling) -> shard_pb2.FeedRequest:
        return shard_pb2.FeedRequest(
            job=self.job,
            timeline=self.timeline,
            plan=number,
            address=filling.address,
            feed=part.feed,
            chunks=list(part.chunks),
            repair_mbps=filling.repair_mbps,
        )

    async def _ask(self, channel: Channel, request: shard_pb2.FeedRequest) -> None:
        """Ask a former shard for its part until it has heard of it, or this object is closed."""
        try:
            while True:
                try:
                    await channel.call("Shard.Feed", request, timeout=_ASK_S)
                    return
                except errors.RetryableError as error:
                    log.info("trying again to reach a former shard", at=channel.address, reason=str(error))
                    await asyncio.sleep(_AGAIN_S)
                except errors.ParamServerError as error:
                    log.info("a former shard does not bring its chunks ahead", at=channel.address, reason=str(error))
                    return
        finally:
            await channel.close()
