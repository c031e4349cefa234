"""Whether a server may send the chunk that a frame of its answer to a pull lists."""

from __future__ import annotations

from collections.abc import Container

from paramserver import errors
from paramserver.compress.base import Compressor
from paramserver.compress.options import compressible
from paramserver.core.layout.plan import Plan
from paramserver.tensors.codec import Ref
from paramserver.tensors.dtypes import wire_dtype
from paramserver.v1 import shard_pb2


def checked(
    ref: Ref,
    plan: Plan,
    shard: int,
    name: str,
    seen: Container[int],
    rounding: Compressor | None = None,
) -> int:
    """The index of a chunk. Raises ProtocolError unless the server may send this chunk, in this shape and rounding."""
    if not isinstance(ref, shard_pb2.ChunkRef):
        raise errors.ProtocolError(f"{name} sent optimizer state where weights were asked for")
    if ref.index >= len(plan.owner) or plan.owner[ref.index] != shard or ref.index in seen:
        raise errors.ProtocolError(f"{name} sent chunk {ref.index}, which is not its to send")
    chunk = plan.layout.chunks[ref.index]
    how = rounding if compressible(chunk) else None
    encoding = shard_pb2.ENCODING_EXACT if how is None else how.encoding
    if (ref.start, ref.encoding, ref.dtype) != (chunk.start, encoding, wire_dtype(chunk.dtype)):
        raise errors.ProtocolError(f"{name} sent chunk {ref.index} of another shape")
    if how is not None:
        how.check(ref.bytes, chunk.elements)
    elif ref.bytes != chunk.nbytes:
        raise errors.ProtocolError(f"{name} sent chunk {ref.index} of another shape")
    return ref.index
