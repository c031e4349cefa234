"""Copies of a device's contributions in main memory, if possible where servers of this host read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paramserver.core.layout.plan import Kind, Layout, Segment
from paramserver.tensors.dtypes import torch_dtype
from paramserver.worker.device import Mover, Ticket
from paramserver.worker.flat import FlatSpace, PartialSum, PartialSumPool, no_space


class Copying(Ticket):
    """A copy of a device's partial sum that is made chunk by chunk, while the sum is computed.

    ``of_device`` is written by the script's thread and those of autograd, one at a time; they begin the copies, too. A
    chunk must not be written to after its copy has begun. ``space`` lies in main memory.
    """

    def __init__(self, of_device: PartialSum, space: FlatSpace, mover: Mover) -> None:
        self.of_device, self.space, self._mover = of_device, space, mover
        self._left = set(space.held_chunks())
        self._begun: list[Ticket] = []

    def begin(self, chunk: int) -> Ticket:
        """Begin to copy a chunk, once."""
        self._left.remove(chunk)
        return self._fetch([chunk])

    def finish(self) -> tuple[PartialSum, Ticket]:
        """Begin to copy all chunks that are left; the ticket is that of the whole copy."""
        left, self._left = sorted(self._left), set()
        self._fetch(left)
        return _like(self.of_device, self.space), self

    def wait(self) -> None:
        """Return when all copies that have begun are done. From any thread."""
        for ticket in list(self._begun):
            ticket.wait()

    def _fetch(self, chunks: Sequence[int]) -> Ticket:
        source, target = self.of_device.space, self.space
        self._begun.append(self._mover.fetch([source.chunk(i) for i in chunks], [target.chunk(i) for i in chunks]))
        return self._begun[-1]


class Staging:
    """``inbox`` gives memory that servers read, while it has some. ``pool`` takes the copies back."""

    def __init__(self, layout: Layout, mover: Mover, inbox: Callable[[], FlatSpace | None] = no_space) -> None:
        self._layout, self._mover, self._inbox = layout, mover, inbox
        self.pool = PartialSumPool(layout, torch.device("cpu"), self._space)

    def fetch(self, partial: PartialSum) -> tuple[PartialSum, Ticket]:
        """Begin to copy a settled partial sum; it must not be written to before the ticket has been waited for."""
        space = self.pool.take().space
        return _like(partial, space), self._mover.fetch(partial.space.segments(), space.segments())

    def begin(self, partial: PartialSum) -> Copying:
        """A copy of a partial sum that is about to be computed."""
        return Copying(partial, self.pool.take().space, self._mover)

    def _space(self) -> FlatSpace:
        space = self._inbox()
        if space is not None:
            for segment in space.segments():
                self._mover.lock(segment, writable=True)
            return space

        def memory(segment: Segment) -> torch.Tensor:
            return self._mover.zeros(segment.elements, torch_dtype(segment.dtype))

        return FlatSpace(self._layout, torch.device("cpu"), (Kind.PARAMETER, Kind.BUFFER), memory)


def _like(partial: PartialSum, space: FlatSpace) -> PartialSum:
    """The same partial sum in other memory."""
    return PartialSum(space, partial.samples, partial.overflow, set(partial.used))
