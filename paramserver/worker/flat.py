"""The model in flat form: segments of one element type each, in which every tensor has its place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from paramserver.compress.casts import Cast
from paramserver.compress.options import compressible
from paramserver.core.layout.plan import Kind, Layout, Segment
from paramserver.tensors.dtypes import buffer_of, tensor_from, torch_dtype
from paramserver.tensors.private import copy_all, scale_all


class FlatSpace:
    """One value for every element of a layout, by segment, on one device.

    ``kinds``: segments of other kinds stay unallocated. Padding between tensors is zero and stays zero. ``memory``
    gives the flat tensor of a segment, instead of an allocated one. ``number`` is the slot of the inbox in which this
    space lies.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        kinds: Sequence[Kind] = tuple(Kind),
        memory: Callable[[Segment], torch.Tensor] | None = None,
        number: int | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.number = number
        # The memory belongs to its caller.
        self.lent = memory is not None
        # Of a partial sum: the tensors whose places may hold other numbers than zeros.
        self.written: set[int] = set()

        self._segments: dict[int, torch.Tensor] = {
            segment.index: (memory or self._zeros)(segment) for segment in layout.segments if segment.kind in kinds
        }
        self._views: dict[int, torch.Tensor] = {}
        for placement, spec in zip(layout.placements, layout.tensors, strict=True):
            flat = self._segments.get(placement.segment)
            if flat is not None:
                part = flat[placement.offset : placement.offset + placement.elements]
                self._views[placement.tensor] = part.view(spec.shape)

    def _zeros(self, segment: Segment) -> torch.Tensor:
        return torch.zeros(segment.elements, dtype=torch_dtype(segment.dtype), device=self.device)

    def twin(self) -> FlatSpace:
        """A space of zeros for another version of the same model. Frozen segments are in both spaces."""

        def memory(segment: Segment) -> torch.Tensor:
            return self._segments[segment.index] if segment.kind is Kind.FROZEN else self._zeros(segment)

        other = FlatSpace(self.layout, self.device, memory=memory)
        other.lent = self.lent
        return other

    def view(self, tensor: int) -> torch.Tensor:
        """The place of a tensor, in its shape and the segment's (master) type."""
        return self._views[tensor]

    def segments(self) -> list[torch.Tensor]:
        """The flat segments that are allocated, in order."""
        return [self._segments[index] for index in sorted(self._segments)]

    def write(self, chunks: Mapping[int, memoryview], rounding: Cast | None = None) -> None:
        """Overwrite these chunks with received bytes; trained float32 chunks come as ``rounding`` has made them.

        Chunks that were received into this space are in their places already.
        """
        for target, source in self.places(chunks, rounding):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def places(
        self, chunks: Mapping[int, memoryview], rounding: Cast | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The place of each of these chunks, and the received bytes as a tensor; see :meth:`write`."""
        for index, data in chunks.items():
            chunk = self.layout.chunks[index]
            dtype = chunk.dtype if rounding is None or not compressible(chunk) else rounding.type_name
            yield self.chunk(index), tensor_from(data, dtype)

    def on_cpu(self) -> FlatSpace:
        """This space, or a copy in main memory (one transfer per segment) if this space is on a device."""
        if self.device.type == "cpu":
            return self
        kinds = {segment.kind for segment in self.layout.segments if segment.index in self._segments}
        return FlatSpace(
            self.layout, torch.device("cpu"), tuple(kinds), lambda segment: self._segments[segment.index].cpu()
        )

    def held_chunks(self) -> list[int]:
        """The numbers of the chunks whose segments are allocated."""
        return [chunk.index for chunk in self.layout.chunks if chunk.segment in self._segments]

    def chunk(self, index: int) -> torch.Tensor:
        """A chunk, flat, without a copy."""
        where = self.layout.chunks[index]
        return self._segments[where.segment][where.start : where.start + where.elements]

    def read(self, chunk: int) -> memoryview:
        """The bytes of a chunk, without a copy; for spaces in main memory."""
        return buffer_of(self.chunk(chunk))

    def copy_of(self, other: FlatSpace) -> None:
        """Take over all values of another space of the same layout."""
        for index, flat in self._segments.items():
            flat.copy_(other._segments[index])

    def sum_of(self, left: FlatSpace, right: FlatSpace) -> None:
        """Become the sum of two spaces of the same layout, of which this space may be one."""
        for index, flat in self._segments.items():
            torch.add(left._segments[index], right._segments[index], out=flat)

    def add(self, other: FlatSpace) -> None:
        """Add another space of the same layout, element by element."""
        for index, flat in self._segments.items():
            flat.add_(other._segments[index])


@dataclass(slots=True)
class PartialSum:
    """The sum over some slices of (samples × mean gradient), and for buffers of (samples × change).

    Code that writes a tensor's place writes all of it and adds the tensor to ``used``. Other places count only after
    :meth:`settle`.
    """

    space: FlatSpace
    samples: int = 0
    overflow: bool = False
    used: set[int] = field(default_factory=set)

    def settle(self) -> None:
        """All used tensors have been written: the places of other tensors hold zeros from now on."""
        self.clear_but(self.used)

    def clear_but(self, used: Set[int]) -> None:
        """These tensors will have been written: the places of other tensors hold zeros from now on."""
        for index in self.space.written - used:
            self.space.view(index).zero_()
        self.space.written = set(used)

    def digests(self) -> list[bytes]:
        """A digest of each tensor of a settled sum, by index; empty for a tensor that it does not have."""
        space = self.space.on_cpu()
        digests = [b""] * len(space.layout.tensors)
        for index in () if self.overflow else self.used:
            digests[index] = hashlib.blake2b(buffer_of(space.view(index)), digest_size=8).digest()
        return digests

    def absorb(self, right: PartialSum) -> None:
        """Become the sum of this partial sum and its right neighbour in the reduction tree, both of them settled."""
        self.space.add(right.space)
        self.space.written |= right.used
        self.samples += right.samples
        self.overflow = self.overflow or right.overflow
        self.used |= right.used


def put(place: torch.Tensor, gradient: torch.Tensor, samples: int, unscale: float = 1.0) -> None:
    """Write samples × unscale × gradient into the place of a parameter, which may have a wider type."""
    if unscale == 1.0 and gradient.dtype == place.dtype:
        torch.mul(gradient, samples, out=place)  # one pass over the memory
        return
    place.copy_(gradient)
    if unscale != 1.0:
        place.mul_(unscale)
    place.mul_(samples)


def put_all(places: list[torch.Tensor], gradients: list[torch.Tensor], samples: int, unscale: float = 1.0) -> None:
    """`put` for many at once: to begin an operation on a device takes longer than most operations on it."""
    if not places:
        return
    copy_all(places, gradients)
    if unscale != 1.0:
        scale_all(places, unscale)
    scale_all(places, samples)


def no_space() -> FlatSpace | None:
    """Stands for an inbox where servers can read no memory of this worker."""
    return None


class PartialSumPool:
    """Reuses the memory of partial sums: a step needs a few, every step the same.

    ``spaces`` gives memory that servers can read where it is, while it has some.
    """

    def __init__(self, layout: Layout, device: torch.device, spaces: Callable[[], FlatSpace | None] = no_space) -> None:
        self.device = device
        self._layout, self._spaces = layout, spaces
        self._free: list[FlatSpace] = []
        self._lent: list[tuple[int, FlatSpace, Callable[[], bool]]] = []

    def take(self) -> PartialSum:
        """An empty partial sum; its memory may still hold old numbers."""
        if not self._free:
            space = self._spaces()
            return PartialSum(space or FlatSpace(self._layout, self.device, (Kind.PARAMETER, Kind.BUFFER)))
        return PartialSum(self._free.pop())

    def give(self, partial: PartialSum) -> None:
        """The partial sum is no longer needed."""
        partial.space.written |= partial.used
        self._free.append(partial.space)

    def lend(self, partial: PartialSum, step: int, sent: Callable[[], bool]) -> None:
        """The partial sum is needed until the step is done, even if its push is over.

        Servers may read it in place, and a server to which a shard moves is sent it again.
        """
        partial.space.written |= partial.used
        self._lent.append((step, partial.space, sent))

    def installed(self, version: int) -> None:
        """All shards have published ``version``: nobody needs contributions of earlier steps any more."""
        back = [lent for lent in self._lent if lent[0] < version and lent[2]()]
        self._lent = [lent for lent in self._lent if lent not in back]
        self._free += [space for _, space, _ in back]
