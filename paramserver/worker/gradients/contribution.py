"""Facts about a contribution, and the frames in which it is pushed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver.core.layout.plan import Chunk
from paramserver.core.versions.names import Name
from paramserver.frames import AnyFrame
from paramserver.tensors.codec import chunk_frames
from paramserver.tensors.dtypes import buffer_of
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import chunk_ref
from paramserver.worker.gradients.leaving import EarlyChunks

if TYPE_CHECKING:
    from paramserver.worker.gradients.outgoing import Encoded

# A push of less is one frame. Else each chunk has one of its own: servers begin with a chunk when all have sent it.
_FRAME_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class PushFacts:
    """All of a contribution except its bytes. ``base_versions``: by server, the version it was computed on.

    ``slot``: its place in this worker's inbox, if it lies there. ``encoded``: the compressed chunks by their index.
    ``by_data``: contributions of the same name are equal.
    """

    name: Name
    samples: int
    overflow: bool
    used: frozenset[int]
    groups: Sequence[types_pb2.GroupHypers]
    base_versions: Sequence[int]
    clock: int = 0
    schedule: shard_pb2.Schedule = shard_pb2.SCHEDULE_OTHER
    clip_norm: float = 0.0
    nonce: int = 0
    slot: int | None = None
    encoded: Mapping[int, Encoded] = field(default_factory=dict)
    by_data: bool = True


def frames_of(
    header: shard_pb2.PushHeader,
    facts: PushFacts,
    chunks: Sequence[Chunk],
    read: Callable[[int], memoryview],
    apart: bool = False,
) -> Iterator[AnyFrame]:
    """The frames of a push of these chunks. ``read`` gives the bytes of a chunk by its index.

    ``apart``: each chunk has a frame of its own, however small it is.
    """
    parts = (_part(chunk, facts.encoded, read) for chunk in chunks)
    if not apart and sum(chunk.nbytes for chunk in chunks) <= _FRAME_BYTES:
        yield from chunk_frames(header, parts)
    else:
        yield from chunk_frames(header, ())  # at once, so that servers know of it
        yield from chunk_frames(None, parts, 1)


async def frames_as_ready(
    header: shard_pb2.PushHeader, chunks: Mapping[int, Chunk], read: Callable[[int], memoryview], early: EarlyChunks
) -> AsyncIterator[AnyFrame]:
    """The frames of a push while its contribution is computed: one for each chunk."""
    for frame in chunk_frames(header, ()):
        yield frame
    async for index in early.of(frozenset(chunks)):
        for frame in chunk_frames(None, [(chunk_ref(chunks[index]), read(index))]):
            yield frame


def _part(
    chunk: Chunk, encoded: Mapping[int, Encoded], read: Callable[[int], memoryview]
) -> tuple[shard_pb2.ChunkRef, memoryview]:
    """A chunk as a frame carries it."""
    made = encoded.get(chunk.index)
    if made is None:
        return chunk_ref(chunk), read(chunk.index)
    return chunk_ref(chunk, made.encoding, made.payload.numel()), buffer_of(made.payload)
