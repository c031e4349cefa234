"""Where every tensor lies in the flat layout, how the layout is cut into chunks, and which shard each chunk belongs to.

The layout depends on the model and the size of a chunk alone, so that the arithmetic on a chunk gives the same bits on
any number of shards. Only the plan knows how many shards there are.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

# Bytes. Tensors and chunks begin at multiples of it, so that vector instructions treat them as tensors of their own.
ALIGNMENT = 64
MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 8 * 1024 * 1024
# A layout of more chunks costs more than can come of it: each is an object here, and a call on the network.
MAX_CHUNKS = 100_000
MAX_SHARDS = 4096
# The group of buffers to which the servers add the changes of all slices. Of other buffers they take the mean change.
ADDED = 1
# Element types of segments and chunks, with their sizes in bytes.
ITEMSIZE = {"float32": 4, "float64": 8}

_MASTER = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
_WHOLE_NUMBERS = frozenset(("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))


class Kind(enum.Enum):
    """How the servers treat a tensor: trained, averaged or added over the slices of a step, or only kept."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    FROZEN = "frozen"


# Trained chunks cost traffic and optimizer state on every step, so they are spread first.
_SPREAD_ORDER = (Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model. ``dtype`` is the model's own, by its torch name, such as "bfloat16".

    ``group`` is the optimizer's parameter group, or of a buffer ``ADDED`` or 0; ``aliases`` are further names of the
    same (tied) tensor;
    ``persistent`` is False for buffers that a state dict leaves out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = Kind.PARAMETER
    group: int = 0
    aliases: tuple[str, ...] = ()
    persistent: bool = True

    @property
    def elements(self) -> int:
        """How many elements it has: 1 for a scalar, 0 if any dimension is 0."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """One flat array: the tensors of one kind, parameter group and master dtype. ``elements`` includes padding."""

    index: int
    kind: Kind
    group: int
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lies: ``elements`` elements from element ``offset`` of the segment."""

    tensor: int
    segment: int
    offset: int
    elements: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that lies in a chunk: where it begins in the (flattened) tensor and in the chunk."""

    tensor: int
    tensor_start: int
    chunk_start: int
    elements: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``start`` to ``start + elements`` of a segment. Elements outside of all pieces are padding, always 0.

    ``first``: the first of the chunks that hold one tensor together and are updated together; None: it is updated by
    itself.
    """

    index: int
    segment: int
    kind: Kind
    group: int
    dtype: str
    start: int
    elements: int
    pieces: tuple[Piece, ...]
    first: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in master dtype, with padding."""
        return self.elements * ITEMSIZE[self.dtype]

    @property
    def leads(self) -> bool:
        """Whether it has the optimizer state: of itself, or of all chunks that are updated together with it."""
        return self.first in (None, self.index)

    def uses(self, tensors: Container[int]) -> bool:
        """True if the chunk holds a part of one of these tensors."""
        return any(piece.tensor in tensors for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat layout of a model. Placements are in the order of the tensors; chunks in the order of the segments."""

    tensors: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]
    placements: tuple[Placement, ...]
    chunks: tuple[Chunk, ...]
    chunk_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, with padding."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) over tensors, segments, placements and chunk boundaries; computed on each call."""
        facts = [
            "paramserver layout 1",
            self.chunk_bytes,
            [[t.name, t.shape, t.dtype, t.kind.value, t.group, t.aliases, t.persistent] for t in self.tensors],
            [[s.kind.value, s.group, s.dtype, s.elements] for s in self.segments],
            [[p.tensor, p.segment, p.offset, p.elements] for p in self.placements],
            [[c.segment, c.start, c.elements, *(() if c.first is None else (c.first,))] for c in self.chunks],
        ]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """Which shard each chunk belongs to: ``owner[chunk index]`` is a shard index below ``shards``."""

    layout: Layout
    shards: int
    owner: tuple[int, ...]

    def chunks_of(self, shard: int) -> tuple[Chunk, ...]:
        """The chunks of one shard, by index; none if there are more shards than chunks."""
        assert 0 <= shard < self.shards, f"there is no shard {shard} of {self.shards}"
        return tuple(chunk for chunk, owner in zip(self.layout.chunks, self.owner, strict=True) if owner == shard)


def units(chunks: Iterable[Chunk]) -> list[tuple[Chunk, ...]]:
    """Chunks in the order of the plan, as they are updated: one at a time, or all chunks of a tensor together."""
    found: list[list[Chunk]] = []
    for chunk in chunks:
        if chunk.first is not None and found and found[-1][0].index == chunk.first:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return [tuple(unit) for unit in found]


def joined(unit: Sequence[Chunk]) -> Chunk:
    """The chunks that are updated together, as one chunk with the number of the first."""
    first = unit[0]
    if len(unit) == 1:
        return first
    elements = sum(chunk.elements for chunk in unit)
    piece = Piece(first.pieces[0].tensor, 0, 0, sum(piece.elements for chunk in unit for piece in chunk.pieces))
    return replace(first, elements=elements, pieces=(piece,))


def master_dtype(dtype: str, kind: Kind) -> str:
    """The dtype in which servers keep, and messages carry, a tensor of this dtype.

    Buffers of whole numbers (counters) travel as float64, exact up to 2**53. Raises ValueError for other dtypes.
    """
    if kind is Kind.BUFFER and dtype in _WHOLE_NUMBERS:
        return "float64"
    if dtype not in _MASTER:
        raise ValueError(f"a {kind.value} of dtype {dtype} cannot be kept: convert it to {', '.join(sorted(_MASTER))}")
    return _MASTER[dtype]


_LEAST_DEFAULT_BYTES = 256 * 1024
# What a message costs, at both ends together.
_CALL_S = 500e-6


def default_chunk_bytes(total_bytes: int) -> int:
    """A power of two from 256 KiB to 8 MiB; in between it makes 16 to 32 chunks of ``total_bytes``.

    Smaller ones cost a server more in calls than in arithmetic.
    """
    wanted = 1 << max(0, -(-total_bytes // 32) - 1).bit_length()
    return min(MAX_CHUNK_BYTES, max(_LEAST_DEFAULT_BYTES, wanted))


def model_bytes(tensors: Iterable[TensorSpec]) -> int:
    """Bytes of the weights as servers keep them, without the gaps between tensors. Raises ValueError for a dtype."""
    return sum(tensor.elements * ITEMSIZE[master_dtype(tensor.dtype, tensor.kind)] for tensor in tensors)


def moving_bytes(chunks: Iterable[Chunk]) -> int:
    """Bytes of those that travel in each step: all but frozen ones."""
    return sum(chunk.nbytes for chunk in chunks if chunk.kind is not Kind.FROZEN)


def link_chunk_bytes(total_bytes: int, megabits_per_s: float) -> int:
    """The size at which a pipeline of push, update and pull is over soonest: √(M B α / 2), as a power of two.

    ``total_bytes``: of chunks that move in each step; ``megabits_per_s``: of a host's link. See docs/performance.md.
    """
    best = math.sqrt(total_bytes * megabits_per_s * 1e6 / 8 * _CALL_S / 2)
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, 1 << max(0, int(best).bit_length() - 1)))


def make_layout(
    tensors: Sequence[TensorSpec], chunk_bytes: int = 0, whole: Callable[[int], bool] = lambda group: False
) -> Layout:
    """Lay the tensors out and cut the layout into chunks of ``chunk_bytes`` (0: chosen).

    The choice depends on the size of tensors that are not frozen. Frozen tensors travel once and not in every step, so
    a large frozen model gets larger chunks, up to 8 MiB.
    ``whole``: whether tensors of a parameter group are updated whole. Then a chunk ends early before a parameter that
    does not fit, and a parameter that is larger than ``chunk_bytes`` has chunks of its own, which are updated together.
    Raises ValueError if ``chunk_bytes`` or the model cannot be used, and then names the tensor.
    """
    if chunk_bytes < 0 or chunk_bytes % ALIGNMENT:
        raise ValueError(f"chunk_bytes must be a multiple of {ALIGNMENT}, or 0 to have it chosen, not {chunk_bytes}")
    _check_tensors(tensors)
    numbers: dict[tuple[Kind, int, str], int] = {}
    ends: list[int] = []
    placements = []
    for index, tensor in enumerate(tensors):
        dtype = master_dtype(tensor.dtype, tensor.kind)
        number = numbers.setdefault((tensor.kind, tensor.group, dtype), len(numbers))
        if number == len(ends):
            ends.append(0)
        placements.append(Placement(index, number, ends[number], tensor.elements))
        ends[number] += _padded(tensor.elements, dtype)
    segments = tuple(
        Segment(number, kind, group, dtype, ends[number]) for (kind, group, dtype), number in numbers.items()
    )
    frozen = sum(s.elements * ITEMSIZE[s.dtype] for s in segments if s.kind is Kind.FROZEN)
    if not chunk_bytes:
        chunk_bytes = default_chunk_bytes(sum(s.elements * ITEMSIZE[s.dtype] for s in segments) - frozen)
    frozen_bytes = max(chunk_bytes, default_chunk_bytes(frozen))
    _check_chunks(segments, chunk_bytes, frozen_bytes)
    members: list[list[Placement]] = [[] for _ in segments]
    for placement in placements:
        if placement.elements:
            members[placement.segment].append(placement)
    chunks: list[Chunk] = []
    for segment, inside in zip(segments, members, strict=True):
        together = segment.kind is Kind.PARAMETER and whole(segment.group)
        limit = (frozen_bytes if segment.kind is Kind.FROZEN else chunk_bytes) // ITEMSIZE[segment.dtype]
        cuts = _whole_cuts(segment, inside, limit) if together else _even_cuts(segment, limit)
        made = [*_chunks(segment, inside, cuts, len(chunks))]
        chunks.extend(_together(made) if together else made)
    return Layout(tuple(tensors), segments, tuple(placements), tuple(chunks), chunk_bytes)


def make_plan(layout: Layout, shards: int, shares: Sequence[int] = ()) -> Plan:
    """Spread the chunks over the shards by bytes: the largest first, to the shard that lacks most, ties by index.

    Chunks that are updated together go to one shard, as if they were one. Parameters go first, then buffers, then
    frozen tensors, so that both the parameters and the whole are in balance: either way two shards differ by the
    largest at most. ``shares``: how much each shard takes in relation to the others, nothing if 0; without any all take
    as much. Raises ValueError if there is no shard, or none that takes any.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"a plan needs 1 to {MAX_SHARDS} shards, not {shards}")
    parts = shares or [1] * shards
    whole = sum(parts)
    if len(parts) != shards or min(parts) < 0 or not whole:
        raise ValueError(f"{list(parts)[:16]} cannot be the shares of {shards} shards")
    owner_of: dict[int, int] = {}
    # Bytes that each shard has above its share so far; below 0, bytes that it lacks.
    above = [0] * shards
    for kind in _SPREAD_ORDER:
        chunks = [chunk for chunk in layout.chunks if chunk.kind is kind]
        total = sum(chunk.nbytes for chunk in chunks)
        heap = [(above[shard] - part * total // whole, shard) for shard, part in enumerate(parts) if part]
        heapq.heapify(heap)
        for unit in sorted(units(chunks), key=lambda unit: (-joined(unit).nbytes, unit[0].index)):
            has, shard = heap[0]
            owner_of.update(dict.fromkeys((chunk.index for chunk in unit), shard))
            heapq.heapreplace(heap, (has + joined(unit).nbytes, shard))
        for has, shard in heap:
            above[shard] = has
    return Plan(layout, shards, tuple(owner_of[chunk.index] for chunk in layout.chunks))


def _check_tensors(tensors: Sequence[TensorSpec]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        for name in (tensor.name, *tensor.aliases):
            if name in names:
                raise ValueError(f"two tensors are called {name!r}: every name and alias must be there once")
            names.add(name)
        if any(size < 0 for size in tensor.shape):
            raise ValueError(f"tensor {tensor.name} has a negative dimension in its shape {tensor.shape}")
        if tensor.group < 0:
            raise ValueError(f"tensor {tensor.name} is in parameter group {tensor.group}: groups count from 0")
        try:
            master_dtype(tensor.dtype, tensor.kind)
        except ValueError as error:
            raise ValueError(f"tensor {tensor.name}: {error}") from None


def _check_chunks(segments: Iterable[Segment], chunk_bytes: int, frozen_bytes: int) -> None:
    """By arithmetic, before anything is made."""
    total = count = 0
    for segment in segments:
        nbytes = segment.elements * ITEMSIZE[segment.dtype]
        total += nbytes
        count += -(-nbytes // (frozen_bytes if segment.kind is Kind.FROZEN else chunk_bytes))
    if count > MAX_CHUNKS:
        raise ValueError(
            f"a model of {total} bytes makes {count} chunks of {chunk_bytes} bytes, and {MAX_CHUNKS} is the most: "
            "set training.chunk_bytes higher, or make the model smaller"
        )


def _padded(elements: int, dtype: str) -> int:
    """The elements with padding up to the alignment."""
    unit = ALIGNMENT // ITEMSIZE[dtype]
    return -(-elements // unit) * unit


def _even_cuts(segment: Segment, limit: int) -> list[int]:
    """Chunk boundaries every ``limit`` elements, without the 0 at the start."""
    return [*range(limit, segment.elements, limit), segment.elements]


def _whole_cuts(segment: Segment, inside: Sequence[Placement], limit: int) -> list[int]:
    """Chunk boundaries at which no tensor of up to ``limit`` elements is cut, and none shares a chunk with a part."""
    cuts: list[int] = []
    start = 0
    for placement in inside:
        end = placement.offset + _padded(placement.elements, segment.dtype)
        if end - start > limit and placement.offset > start:
            cuts.append(placement.offset)
            start = placement.offset
        if end - start > limit:
            cuts.extend([*range(start + limit, end, limit), end])
            start = end
    return [*cuts, segment.elements]


def _together(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same chunks; those that hold parts of one tensor are to be updated together."""
    firsts: dict[int, int] = {}
    found = list(chunks)
    parts = Counter(piece.tensor for chunk in found for piece in chunk.pieces)
    for chunk in found:
        tensor = chunk.pieces[0].tensor if chunk.pieces else -1
        yield replace(chunk, first=firsts.setdefault(tensor, chunk.index)) if parts[tensor] > 1 else chunk


def _chunks(segment: Segment, inside: Sequence[Placement], cuts: Sequence[int], index: int) -> Iterator[Chunk]:
    """The chunks of one segment, the first of which gets number ``index``; ``inside`` are its tensors, none empty."""
    start = first = 0
    for end in cuts:
        if end == start:
            continue
        while first < len(inside) and inside[first].offset + inside[first].elements <= start:
            first += 1
        pieces = []
        for number in range(first, len(inside)):
            placement = inside[number]
            if placement.offset >= end:
                break
            lo, hi = max(start, placement.offset), min(end, placement.offset + placement.elements)
            pieces.append(Piece(placement.tensor, lo - placement.offset, lo - start, hi - lo))
        yield Chunk(index, segment.index, segment.kind, segment.group, segment.dtype, start, end - start, tuple(pieces))
        index += 1
        start = end
