"""A published version of a shard's weights: immutable, encoded once for all pulls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from paramserver.compress.base import Compressor
from paramserver.compress.options import compressible
from paramserver.core.layout.plan import Chunk, Kind
from paramserver.frames import Frame
from paramserver.tensors.codec import chunk_frames
from paramserver.tensors.dtypes import buffer_of, torch_dtype
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref

if TYPE_CHECKING:
    import torch

# Workers compute with the first weights while the rest is on its way: on a link of 1 Gb/s a frame takes 4 ms.
_FRAME_BYTES = 512 << 10


class Version:
    """Version ``number`` of the chunks of one shard. The tensors are never written to again."""

    def __init__(
        self,
        number: int,
        chunks: Sequence[Chunk],
        tensors: Mapping[int, torch.Tensor],
        ever_used: frozenset[int] = frozenset(),
    ) -> None:
        self.number = number
        self.tensors = dict(tensors)
        # As in `PullHeader`. Of the version that a shard begins with, known when the shard begins.
        self.ever_used = ever_used
        # Where it lies in memory shared with workers, if it does.
        self.slot: int | None = None
        # In the order in which they leave: buffers, with which every slice begins, then as layers come.
        self._chunks = sorted(chunks, key=lambda chunk: chunk.kind is not Kind.BUFFER)
        # The number of the draft that it was, if it was one; a pull without frozen chunks then has one frame per chunk.
        self.draft = 0
        # By whether frozen chunks are among them, and by encoding.
        self._frames: dict[tuple[bool, int], list[Frame]] = {}

    def moving(self, frozen: bool) -> list[Chunk]:
        """The chunks that change with versions; with ``frozen``, also those that never do."""
        return [chunk for chunk in self._chunks if frozen or chunk.kind is not Kind.FROZEN]

    def same_as(self, other: Version) -> bool:
        """Whether it has the very tensors of another version of this shard."""
        return all(self.tensors[chunk.index] is other.tensors[chunk.index] for chunk in self.moving(False))

    def frames(self, frozen: bool, rounding: Compressor | None = None) -> list[Frame]:
        """The frames of a pull, without its header. Encoded on first use; not thread-safe.

        ``rounding``: for trained float32 chunks; this version itself stays as it is.
        """
        key = _key(frozen, rounding)
        if key not in self._frames:
            self._frames[key] = list(self.passing(frozen, rounding))
        return self._frames[key]

    def passing(self, frozen: bool, rounding: Compressor | None = None) -> Iterator[Frame]:
        """The same, encoded as they are asked for, and not kept."""
        parts = (part(chunk, self.tensors[chunk.index], rounding) for chunk in self.moving(frozen))
        return chunk_frames(None, parts, _FRAME_BYTES)

    def encoded(self, frozen: bool, rounding: Compressor | None = None) -> bool:
        """True if :meth:`frames` costs nothing."""
        return _key(frozen, rounding) in self._frames

    def was(self, draft: int, rounding: Compressor | None, frames: list[Frame]) -> None:
        """The version was the draft of this number, and these are its frames. Not thread-safe."""
        self.draft = draft
        self._frames[_key(False, rounding)] = frames


def room_for(chunks: Iterable[Chunk]) -> dict[int, torch.Tensor]:
    """Memory for chunks that come and go together, in one piece for each type: then the system gets all of it back."""
    import torch

    by_type: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_type.setdefault(chunk.dtype, []).append(chunk)
    room: dict[int, torch.Tensor] = {}
    for dtype, members in by_type.items():
        sizes = [chunk.elements for chunk in members]
        parts = torch.split(torch.empty(sum(sizes), dtype=torch_dtype(dtype)), sizes)
        room.update((chunk.index, part) for chunk, part in zip(members, parts, strict=True))
    return room


def again(spare: Mapping[int, torch.Tensor], base: Version) -> Callable[[Chunk], torch.Tensor]:
    """Memory for the version after ``base``: that of a version which nobody reads, as far as ``base`` has other memory.

    Else the allocator keeps it, for another thread than the one that asks next.
    """
    import torch

    def place(chunk: Chunk) -> torch.Tensor:
        old = spare.get(chunk.index)
        return torch.empty_like(base.tensors[chunk.index]) if old is None or old is base.tensors[chunk.index] else old

    return place


def part(chunk: Chunk, weights: torch.Tensor, rounding: Compressor | None) -> tuple[shard_pb2.ChunkRef, memoryview]:
    """A chunk of weights as a frame carries it; trained float32 numbers are rounded."""
    if rounding is None or not compressible(chunk):
        return chunk_ref(chunk), buffer_of(weights)
    payload = rounding.encode(weights, None)
    return chunk_ref(chunk, rounding.encoding, payload.numel()), buffer_of(payload)


def _key(frozen: bool, rounding: Compressor | None) -> tuple[bool, int]:
    return frozen, shard_pb2.ENCODING_EXACT if rounding is None else rounding.encoding
