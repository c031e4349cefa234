"""What shards answer to a pull."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramserver import errors
from paramserver.core.consistency import Consistency
from paramserver.core.plan import Plan
from paramserver.tensors.dtypes import wire_dtype
from paramserver.v1 import shard_pb2


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one shard answered: raw bytes by chunk index, and its header."""

    version: int
    min_clock: int
    skipped: int
    consistency: Consistency
    chunks: dict[int, memoryview]
    schedule: shard_pb2.Schedule = shard_pb2.SCHEDULE_UNSPECIFIED
    # Slices of the step before that were given to others than their owners; server 0 knows.
    taken: frozenset[int] = frozenset()
    # Where the weights lie in memory shared with the server, if they do.
    slot: int | None = None


def checked(ref: shard_pb2.ChunkRef | shard_pb2.StateRef, plan: Plan, server: int, seen: Mapping[int, object]) -> int:
    """The index of a chunk that this server may send, in the shape that the plan says."""
    if not isinstance(ref, shard_pb2.ChunkRef):
        raise errors.ProtocolError(f"server-{server} sent optimizer state where weights were asked for")
    if ref.index >= len(plan.owner) or plan.owner[ref.index] != server or ref.index in seen:
        raise errors.ProtocolError(f"server-{server} sent chunk {ref.index}, which is not its to send")
    chunk = plan.layout.chunks[ref.index]
    if (ref.start, ref.bytes, ref.dtype) != (chunk.start, chunk.nbytes, wire_dtype(chunk.dtype)):
        raise errors.ProtocolError(f"server-{server} sent chunk {ref.index} of another shape")
    return ref.index


def merge(results: Sequence[Pulled]) -> Mapping[int, memoryview]:
    """All chunks of all shards."""
    chunks: dict[int, memoryview] = {}
    for result in results:
        chunks.update(result.chunks)
    return chunks
