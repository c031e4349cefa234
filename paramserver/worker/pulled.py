"""What shards answer to a pull."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramserver import errors
from paramserver.compress.base import Compressor
from paramserver.compress.registry import compressible
from paramserver.core.consistency import Consistency
from paramserver.core.plan import Plan
from paramserver.tensors.dtypes import wire_dtype
from paramserver.transport.messages import consistency_from_proto
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


def checked(
    ref: shard_pb2.ChunkRef | shard_pb2.StateRef,
    plan: Plan,
    server: int,
    seen: Mapping[int, object],
    rounding: Compressor | None = None,
) -> int:
    """The index of a chunk that this server may send, in the shape that the plan says, rounded as it was asked for."""
    if not isinstance(ref, shard_pb2.ChunkRef):
        raise errors.ProtocolError(f"server-{server} sent optimizer state where weights were asked for")
    if ref.index >= len(plan.owner) or plan.owner[ref.index] != server or ref.index in seen:
        raise errors.ProtocolError(f"server-{server} sent chunk {ref.index}, which is not its to send")
    chunk = plan.layout.chunks[ref.index]
    how = rounding if compressible(chunk) else None
    encoding = shard_pb2.ENCODING_EXACT if how is None else how.encoding
    if (ref.start, ref.encoding, ref.dtype) != (chunk.start, encoding, wire_dtype(chunk.dtype)):
        raise errors.ProtocolError(f"server-{server} sent chunk {ref.index} of another shape")
    if how is not None:
        how.check(ref.bytes, chunk.elements)
    elif ref.bytes != chunk.nbytes:
        raise errors.ProtocolError(f"server-{server} sent chunk {ref.index} of another shape")
    return ref.index


def merge(results: Sequence[Pulled]) -> Mapping[int, memoryview]:
    """All chunks of all shards."""
    chunks: dict[int, memoryview] = {}
    for result in results:
        chunks.update(result.chunks)
    return chunks


def pulled_of(header: shard_pb2.PullHeader, chunks: dict[int, memoryview]) -> Pulled:
    """The answer to a pull."""
    return Pulled(
        header.version,
        header.min_clock,
        header.skipped,
        consistency_from_proto(header.consistency),
        chunks,
        header.schedule,
        frozenset(header.taken),
        header.slot if header.HasField("slot") else None,
    )
