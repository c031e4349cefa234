"""Uploads: a stream of frames becomes checked chunks, or an error and nothing.

Everything is checked against the layout before it is used: which chunks, their starts, lengths and types, that they are
finite, that none is missing or comes twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paramserver.compress.base import Compressor
from paramserver.compress.options import compressible
from paramserver.compress.registry import FOR_PUSH, NONE, reader
from paramserver.core.layout.plan import Chunk, Layout
from paramserver.errors import ProtocolError
from paramserver.frames import AnyFrame
from paramserver.tensors.codec import split_frame
from paramserver.tensors.dtypes import tensor_from, wire_dtype
from paramserver.tensors.finite import is_finite
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Upload:
    """A received stream: its first header and, by chunk index, read-only views or copies of the received bytes."""

    header: shard_pb2.FrameHeader
    chunks: dict[int, torch.Tensor]
    payload_bytes: int


# Has a chunk made, in a thread.
Decode = Callable[[Callable[[], "torch.Tensor"]], Awaitable["torch.Tensor"]]


async def receive(
    frames: AsyncIterator[AnyFrame],
    kind: str,
    expect: Callable[[shard_pb2.FrameHeader], tuple[Mapping[int, Chunk], int]],
    keep: Callable[[Chunk, torch.Tensor], torch.Tensor] = lambda chunk, values: values,
    chunks: dict[int, torch.Tensor] | None = None,
    came: Callable[[int], None] = lambda index: None,
    decode: Decode | None = None,
    state: Callable[[shard_pb2.StateRef, memoryview], None] | None = None,
    some: bool = False,
    open_end: bool = False,
) -> Upload:
    """Read a whole upload. It is put into ``chunks`` bit by bit, if given, and ``came`` hears of each chunk.

    ``kind`` is the field of the first header that must be set ("push", "initialize"). ``expect`` gets that first
    header, checks it, and returns the chunks that must follow with the number that the sender announced. ``keep`` says
    what is kept of each chunk instead of a view of what was received. ``decode`` does the work for chunks that come in
    another form, ``state`` takes pieces of optimizer state; without them, there must be none.
    ``some``: the sender may announce less; ``open_end``: less may come. Raises ProtocolError unless exactly these
    chunks come.
    """
    first: shard_pb2.FrameHeader | None = None
    expected: Mapping[int, Chunk] = {}
    announced = 0
    chunks = {} if chunks is None else chunks
    encodings = NONE if decode is None else FOR_PUSH
    payload = 0
    async for raw in frames:
        header, parts = split_frame(raw)
        if first is None:
            if header.WhichOneof("first") != kind:
                raise ProtocolError(f"the first frame of this stream must carry a {kind} header")
            first = header
            expected, announced = expect(header)
            if announced > len(expected) or (announced < len(expected) and not some and not open_end):
                raise ProtocolError(f"the stream announces {announced} chunks, but {len(expected)} belong to it")
        elif header.WhichOneof("first") is not None:
            raise ProtocolError("only the first frame of a stream may carry its header")
        for ref, data in parts:
            if isinstance(ref, shard_pb2.StateRef) and state is not None:
                state(ref, data)
                payload += len(data)
                continue
            chunk, how = _checked(ref, expected, chunks, encodings)
            if how is None or decode is None:
                chunks[chunk.index] = keep(chunk, tensor_from(data, chunk.dtype))
            else:
                chunks[chunk.index] = await decode(partial(how.decode, data, chunk.elements))
            payload += len(data)
            came(chunk.index)
    if first is None:
        raise ProtocolError("the stream ended before its first frame")
    if len(chunks) != announced and not open_end:
        missing = next(index for index in expected if index not in chunks)
        raise ProtocolError(f"{announced - len(chunks)} of {announced} chunks are missing, the first is {missing}")
    return Upload(first, chunks, payload)


def _checked(
    ref: shard_pb2.ChunkRef | shard_pb2.StateRef,
    expected: Mapping[int, Chunk],
    seen: Container[int],
    encodings: frozenset[int],
) -> tuple[Chunk, Compressor | None]:
    """The chunk of a reference, and the compressor that decodes it; None if it is not encoded."""
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
    how = reader(ref.encoding, encodings)
    if how is not None:
        if not compressible(chunk):
            raise ProtocolError(f"chunk {ref.index} is a {chunk.kind.value} of {chunk.dtype} and cannot be {how.name}")
        how.check(ref.bytes, chunk.elements)
    elif ref.bytes != chunk.nbytes:
        raise ProtocolError(f"chunk {ref.index} has {chunk.nbytes} bytes, the message says {ref.bytes}")
    return chunk, how


def first_non_finite(layout: Layout, chunks: Mapping[int, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinite number, or None."""
    for index, values in chunks.items():
        if is_finite(values):
            continue
        for piece in layout.chunks[index].pieces:
            if not is_finite(values[piece.chunk_start : piece.chunk_start + piece.elements]):
                return layout.tensors[piece.tensor].name
    return None
