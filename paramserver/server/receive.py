"""Uploads: a stream of frames becomes checked chunks, or an error and nothing.

Everything is checked against the layout before it is used: which chunks, their starts, lengths and types, that they are
finite, that none is missing or comes twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramserver.core.plan import Chunk, Layout
from paramserver.errors import ProtocolError
from paramserver.tensors.codec import split_frame
from paramserver.tensors.dtypes import tensor_from, wire_dtype
from paramserver.tensors.finite import is_finite
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Upload:
    """What a stream brought: its first header and, by chunk index, read-only views of the received bytes, or copies."""

    header: shard_pb2.FrameHeader
    chunks: dict[int, torch.Tensor]
    payload_bytes: int


async def receive(
    frames: AsyncIterator[bytes],
    kind: str,
    expect: Callable[[shard_pb2.FrameHeader], tuple[Mapping[int, Chunk], int]],
    keep: Callable[[Chunk, torch.Tensor], torch.Tensor] = lambda chunk, values: values,
    chunks: dict[int, torch.Tensor] | None = None,
    came: Callable[[int], None] = lambda index: None,
) -> Upload:
    """Read a whole upload. It is put into ``chunks`` bit by bit, if given, and ``came`` hears of each chunk.

    ``kind`` is the field of the first header that must be set ("push", "initialize"). ``expect`` gets that first
    header, checks it, and returns the chunks that must follow with the number that the sender announced. ``keep`` says
    what is kept of each chunk instead of a view of what was received.
    Raises ProtocolError for anything else than exactly these chunks.
    """
    first: shard_pb2.FrameHeader | None = None
    expected: Mapping[int, Chunk] = {}
    chunks = {} if chunks is None else chunks
    payload = 0
    async for raw in frames:
        header, parts = split_frame(raw)
        if first is None:
            if header.WhichOneof("first") != kind:
                raise ProtocolError(f"the first frame of this stream must carry a {kind} header")
            first = header
            expected, announced = expect(header)
            if announced != len(expected):
                raise ProtocolError(f"the stream announces {announced} chunks, but {len(expected)} belong to it")
        elif header.WhichOneof("first") is not None:
            raise ProtocolError("only the first frame of a stream may carry its header")
        for ref, data in parts:
            chunk = _checked(ref, expected, chunks)
            chunks[chunk.index] = keep(chunk, tensor_from(data, chunk.dtype))
            payload += len(data)
            came(chunk.index)
    if first is None:
        raise ProtocolError("the stream ended before its first frame")
    if len(chunks) != len(expected):
        missing = next(index for index in expected if index not in chunks)
        raise ProtocolError(
            f"{len(expected) - len(chunks)} of {len(expected)} chunks are missing, the first is {missing}"
        )
    return Upload(first, chunks, payload)


def _checked(
    ref: shard_pb2.ChunkRef | shard_pb2.StateRef, expected: Mapping[int, Chunk], seen: Mapping[int, object]
) -> Chunk:
    if not isinstance(ref, shard_pb2.ChunkRef):
        raise ProtocolError("an upload carries optimizer state where only chunks belong")
    chunk = expected.get(ref.index)
    if chunk is None:
        raise ProtocolError(f"chunk {ref.index} does not belong to this stream")
    if ref.index in seen:
        raise ProtocolError(f"chunk {ref.index} comes twice")
    if ref.start != chunk.start:
        raise ProtocolError(f"chunk {ref.index} starts at element {chunk.start}, the message says {ref.start}")
    if ref.dtype != wire_dtype(chunk.dtype):
        raise ProtocolError(f"chunk {ref.index} is {chunk.dtype}, the message has type number {ref.dtype}")
    if ref.bytes != chunk.nbytes:
        raise ProtocolError(f"chunk {ref.index} has {chunk.nbytes} bytes, the message says {ref.bytes}")
    return chunk


def first_non_finite(layout: Layout, chunks: Mapping[int, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinite number, or None."""
    for index, values in chunks.items():
        if is_finite(values):
            continue
        for piece in layout.chunks[index].pieces:
            if not is_finite(values[piece.chunk_start : piece.chunk_start + piece.elements]):
                return layout.tensors[piece.tensor].name
    return None
