"""Messages to one server, made by hand: to repeat them, to break them, to send them at once."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from paramserver.core.layout.hypers import Hypers
from paramserver.core.layout.plan import Chunk, Kind
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.tensors.hypers import groups_to_proto
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import chunk_ref, pack_mask, plan_of, put_name
from paramserver.worker.flat import FlatSpace
from tests.support.cluster.harness import CALL_S, Cluster, until
from tests.support.frames import encode_frame

T = TypeVar("T")


class Raw:
    """Speaks to one server of a running job, in the name of a worker that may be anybody."""

    def __init__(self, cluster: Cluster, server: int = 0, worker: int = 999) -> None:
        self.cluster = cluster
        self.worker = worker
        self.address = f"server-{server}"
        self.channel = cluster.job.network.connect(self.address)
        status = self.run(cluster.job.coordinator.status(coordinator_pb2.StatusRequest(model=True)))
        self.job, self.timeline = status.job, status.view.timeline
        self.plan = plan_of(status.model, status.shards)
        self.layout = self.plan.layout
        self.optimizer = status.model.optimizer
        self.server = server

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the event loop of the job."""
        return self.cluster.job.background.run(work, CALL_S)

    def chunks(self, used: Iterable[int]) -> list[Chunk]:
        """The chunks of this server that a contribution with these tensors brings."""
        wanted = frozenset(used)
        return [
            chunk
            for chunk in self.plan.chunks_of(self.server)
            if chunk.kind is not Kind.FROZEN and any(piece.tensor in wanted for piece in chunk.pieces)
        ]

    def header(self, name: Name, used: Iterable[int], hypers: Sequence[Hypers] | None = None) -> shard_pb2.PushHeader:
        """The header of a proper contribution of one sample."""
        wanted = frozenset(used)
        header = shard_pb2.PushHeader(
            job=self.job,
            timeline=self.timeline,
            worker=self.worker,
            samples=1,
            base_version=name.step if isinstance(name, SyncName) else 0,
            used=pack_mask(wanted, len(self.layout.tensors)),
            groups=self.optimizer.groups if hypers is None else groups_to_proto(hypers),
            chunks=len(self.chunks(wanted)),
        )
        put_name(header, name)
        return header

    def parts(self, values: Mapping[int, torch.Tensor]) -> list[tuple[shard_pb2.ChunkRef, bytes]]:
        """The chunks of these gradients, by tensor, with the bytes of each."""
        space = FlatSpace(self.layout, torch.device("cpu"))
        for tensor, value in values.items():
            space.view(tensor).copy_(value)
        return [(chunk_ref(chunk), bytes(space.read(chunk.index))) for chunk in self.chunks(values)]

    def frames(
        self, header: shard_pb2.PushHeader, parts: Sequence[tuple[shard_pb2.ChunkRef, bytes]], single: bool = False
    ) -> list[bytes]:
        """One frame with everything; ``single``: the header, then every chunk, in frames of their own."""
        if not single:
            first = shard_pb2.FrameHeader(push=header, chunks=[ref for ref, _ in parts])
            return [encode_frame(first, [data for _, data in parts])]
        rest = [encode_frame(shard_pb2.FrameHeader(chunks=[ref]), [data]) for ref, data in parts]
        return [encode_frame(shard_pb2.FrameHeader(push=header), []), *rest]

    def contribution(self, name: Name, values: Mapping[int, torch.Tensor], single: bool = False) -> list[bytes]:
        """The frames of a proper contribution of one sample."""
        return self.frames(self.header(name, values), self.parts(values), single)

    async def upload(self, frames: Iterable[bytes]) -> shard_pb2.PushResponse:
        """Send frames as a push."""
        reply = await self.channel.upload("Shard.Push", frames, timeout=CALL_S)
        assert isinstance(reply, shard_pb2.PushResponse)
        return reply

    def push(self, frames: Iterable[bytes]) -> shard_pb2.PushResponse:
        """Send frames as a push, and wait for the answer."""
        return self.run(self.upload(frames))

    def stats(self) -> shard_pb2.StatsResponse:
        """What the server counts."""
        return self.cluster.stats()[self.server]

    def published(self, version: int) -> None:
        """Wait for a version: a synchronous push is answered when it is counted, not when it is applied."""
        until(f"version {version}", lambda: self.stats().version >= version)

    def one_hot(self, tensor: int, cell: int) -> dict[int, torch.Tensor]:
        """A gradient of a single one."""
        value = torch.zeros(self.layout.tensors[tensor].elements)
        value[cell] = 1.0
        return {tensor: value.view(self.layout.tensors[tensor].shape)}


__all__ = ["AsyncName", "Raw", "SyncName"]
