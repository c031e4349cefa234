"""Copies of a device's contributions in main memory, if possible where servers of this host read them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paramserver.core.layout.plan import Kind, Layout, Segment
from paramserver.tensors.dtypes import torch_dtype
from paramserver.worker.device import Mover, Ticket
from paramserver.worker.flat import FlatSpace, PartialSum, PartialSumPool, no_space


class Staging:
    """``inbox`` gives memory that servers read, while it has some. ``pool`` takes the copies back."""

    def __init__(self, layout: Layout, mover: Mover, inbox: Callable[[], FlatSpace | None] = no_space) -> None:
        self._layout, self._mover, self._inbox = layout, mover, inbox
        self.pool = PartialSumPool(layout, torch.device("cpu"), self._space)

    def fetch(self, partial: PartialSum) -> tuple[PartialSum, Ticket]:
        """Begin to copy a settled partial sum; it must not be written to before the ticket has been waited for."""
        space = self.pool.take().space
        copy = PartialSum(space, partial.samples, partial.overflow, set(partial.used))
        return copy, self._mover.fetch(partial.space.segments(), space.segments())

    def _space(self) -> FlatSpace:
        space = self._inbox()
        if space is not None:
            for segment in space.segments():
                self._mover.lock(segment, writable=True)
            return space

        def memory(segment: Segment) -> torch.Tensor:
            return self._mover.zeros(segment.elements, torch_dtype(segment.dtype))

        return FlatSpace(self._layout, torch.device("cpu"), (Kind.PARAMETER, Kind.BUFFER), memory)
