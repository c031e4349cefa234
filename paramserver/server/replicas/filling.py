"""Fills a shard of a new plan with the chunks of the former shards, which stand at one version.

What the former shards have brought ahead (`parts`) is there already. The rest is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from torch import Tensor

from paramserver.core.layout.catching_up import groups
from paramserver.core.layout.plan import Chunk, Plan
from paramserver.core.layout.replanning import sources
from paramserver.core.versions.events import Activated
from paramserver.errors import ProtocolError
from paramserver.server.arithmetic.state import State
from paramserver.server.replicas.facts import Beside, facts_from_proto
from paramserver.server.replicas.parts import Parts
from paramserver.server.rpc.process import Process
from paramserver.server.running import RunningShard
from paramserver.server.saving.brought import BroughtState
from paramserver.server.versions.receive import receive
from paramserver.server.versions.version import Version, room_for
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2

# Weights that are asked for at a time. Their optimizer state comes with them.
_GROUP_BYTES = 16 << 20
# How long a call may take, and how much longer for each byte, which is the time on a link of 1 Mb/s.
_CALL_S, _BYTE_S = 30.0, 8e-6


async def fill(
    made: RunningShard, filling: shard_pb2.Filling, former: Plan, process: Process, brought: Parts | None
) -> None:
    """Fill ``made``, which has nothing, and publish the version at which the ``former`` shards stand.

    ``brought``: what the former shards have brought ahead. Raises what the calls to the former shards raise; then
    ``made`` is of no use.
    """
    wanted = sources(former, made.plan, made.config.shard)
    # All former shards have the same facts, which the first one tells.
    sends = {0: wanted.get(0, ()), **wanted}
    addresses = {source.index: source.address for source in filling.sources}
    parts = [_Part(made, filling, process, source, chunks, brought) for source, chunks in sends.items()]
    fetching = [part.fetch(addresses[part.source]) for part in parts]
    for failed in filter(None, await asyncio.gather(*fetching, return_exceptions=True)):
        raise failed
    weights: dict[int, Tensor] = {}
    for part in parts:
        weights |= part.weights
        made.tensors.states.update(part.states)
    beside = parts[0].beside
    if beside is None:
        raise ProtocolError("a former shard has not told its counts")
    made.begin_with(beside.facts)
    version = Version(filling.version, made.tensors.chunks, {index: weights[index] for index in made.chunks})
    made.versions[version.number] = version
    made.happen(Activated(made.config.timeline, version.number))
    made.drafting.opened(version)


class _Part:
    """The chunks that come from one former shard; from the first one also the facts."""

    def __init__(
        self,
        made: RunningShard,
        filling: shard_pb2.Filling,
        process: Process,
        source: int,
        chunks: Sequence[int],
        brought: Parts | None,
    ) -> None:
        self.source = source
        self.weights: dict[int, Tensor] = {}
        self.states: dict[int, State] = {}
        self.beside: Beside | None = None
        self._made, self._filling, self._process, self._chunks = made, filling, process, chunks
        if brought is not None and (there := brought.at(source, filling.version)) is not None:
            self.weights, self.states, self._chunks = {**there[0]}, {**there[1]}, ()

    async def fetch(self, address: str) -> None:
        """Get all of it from the shard at ``address``. Raises what the calls raise."""
        channel, chunks = self._process.connect(address), [self._made.chunks[index] for index in self._chunks]
        try:
            for number, group in enumerate(groups(chunks, _GROUP_BYTES, lambda chunk: chunk.leads)):
                await self._group(channel, group, facts=self.source == 0 and number == 0)
        finally:
            await channel.close()

    async def _group(self, channel: Channel, group: Sequence[Chunk], facts: bool) -> None:
        if not group and not facts:
            return
        made, wanted = self._made, {chunk.index: chunk for chunk in group}
        request = shard_pb2.ExportRequest(
            job=made.config.job,
            timeline=self._filling.timeline,
            min_version=self._filling.version,
            chunks=list(wanted),
            facts=facts,
        )
        brought = BroughtState(made.tensors, trusted=True)

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            if header.catch_up.version != self._filling.version:
                raise ProtocolError(f"version {header.catch_up.version} has come, not {self._filling.version}")
            return wanted, header.catch_up.chunks

        room = room_for(wanted.values())
        timeout_s = _CALL_S + 4 * sum(chunk.nbytes for chunk in group) * _BYTE_S
        async with aclosing(channel.download("Shard.Export", request, timeout=timeout_s)) as frames:
            upload = await receive(
                frames, "catch_up", expect, lambda chunk, came: room[chunk.index].copy_(came), state=brought.take
            )
        header = upload.header.catch_up
        loaded = await self._process.arithmetic(lambda: brought.load(header.states, made.hypers.first, wanted))
        self.weights |= upload.chunks
        self.states |= loaded
        if header.HasField("facts"):
            self.beside = facts_from_proto(header.facts, len(made.tensors.layout.tensors))
