"""Calls of a former shard to a shard of a new plan, which it brings chunks while training goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial

from torch import Tensor

from paramserver import errors
from paramserver.core.layout.plan import Chunk
from paramserver.frames import AnyFrame
from paramserver.server.replicas.content import contribution, used_in
from paramserver.server.replicas.parts import Part, Parts
from paramserver.server.rpc.host import Host
from paramserver.server.saving.brought import BroughtState
from paramserver.server.versions.receive import receive
from paramserver.server.versions.version import room_for
from paramserver.v1 import shard_pb2


class PartsCalls:
    """Takes in what former shards send."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def feed(self, request: shard_pb2.FeedRequest) -> shard_pb2.FeedResponse:
        """At a former shard: bring a shard of a new plan these chunks. May be repeated."""
        self._host.process.check_job(request.job)
        shard = self._host.on(request.timeline)
        if not {*request.chunks} <= shard.chunks.keys():
            raise errors.ProtocolError("a chunk was asked for that does not lie on this server")
        if request.plan > self._host.process.settled:
            shard.copies.backups.feed(request)
        return shard_pb2.FeedResponse()

    async def catch_up_part(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.CatchUpResponse:
        """Take in chunks as they are in one version."""
        brought: list[tuple[Parts, Part, BroughtState]] = []
        room: dict[int, Tensor] = {}

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            message = header.catch_up
            parts, part = self._part(message.job, message.timeline, message.feed)
            brought.append((parts, part, BroughtState(part.tensors, trusted=True)))
            return part.chunks, message.chunks

        def keep(chunk: Chunk, values: Tensor) -> Tensor:
            room.update(room_for([chunk]))
            return room[chunk.index].copy_(values)

        def state(ref: shard_pb2.StateRef, data: memoryview) -> None:
            brought[0][2].take(ref, data)

        upload = await receive(frames, "catch_up", expect, keep, state=state, some=True)
        header = upload.header.catch_up
        parts, part, states = brought[0]
        async with part.turn:
            self._part(header.job, header.timeline, header.feed)
            if header.first and part.following.version is None:
                part.following.begin(header.version)
            part.following.here(header.version)
            if not upload.chunks.keys() <= set(part.following.lacks()):  # the answer was lost
                return shard_pb2.CatchUpResponse()
            load = partial(states.load, header.states, parts.hypers.first, upload.chunks)
            part.following.take(upload.chunks, await self._host.process.arithmetic(load))
        return shard_pb2.CatchUpResponse()

    async def forward_part(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.ForwardResponse:
        """Make the next version of the chunks that are there."""
        found: list[tuple[Parts, Part]] = []

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            message = header.forward
            found.append(self._part(message.job, message.timeline, message.feed))
            return found[0][1].tensors.chunks_used(used_in(message, found[0][1].tensors)), message.chunks

        upload = await receive(frames, "forward", expect)
        header = upload.header.forward
        parts, part = found[0]
        async with part.turn:
            self._part(header.job, header.timeline, header.feed)
            there = part.following.version
            if there is not None and there.number == header.version + 1:  # the answer was lost
                return shard_pb2.ForwardResponse()
            part.following.here(header.version)
            made_of = contribution(header, upload.chunks, used_in(header, part.tensors), parts.hypers)
            await self._host.process.arithmetic(lambda: part.following.make(made_of))
        return shard_pb2.ForwardResponse()

    def _part(self, job: str, timeline: int, feed: int) -> tuple[Parts, Part]:
        """The part to which a message belongs. Raises GoneError if there is none."""
        self._host.process.check_job(job)
        parts = self._host.parts
        if parts is None:
            raise errors.GoneError("this shard of a new plan does not want these chunks")
        return parts, parts.fed(timeline, feed)
