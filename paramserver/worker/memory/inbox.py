"""A worker's inbox: memory in which others on its host, servers or a worker, read its contributions where they are."""

from __future__ import annotations

import structlog
import torch

from paramserver.core.layout.arena import Arena
from paramserver.core.layout.plan import ITEMSIZE, Kind, Segment
from paramserver.tensors.dtypes import tensor_from
from paramserver.transport.shm import segments
from paramserver.worker.flat import FlatSpace

log = structlog.get_logger("paramserver.worker")

# Only slots that are used take memory. A worker uses one more than it pushes contributions in a step.
SLOTS = 64


class Inbox:
    """Room for up to ``SLOTS`` contributions, in one piece of memory that others on this host see."""

    def __init__(self, arena: Arena) -> None:
        """Raises OSError if there is no memory to share."""
        self._arena = arena
        self.memory = segments.Segment(SLOTS * arena.slot_bytes)
        self._taken = 0
        self._full = False

    def space(self) -> FlatSpace | None:
        """A space of zeros in the next slot, which is never given back; None if there is no room."""
        if self._full or self._taken == SLOTS:
            return None
        base = self._taken * self._arena.slot_bytes
        try:
            self.memory.reserve(base, self._arena.slot_bytes)
        except OSError as error:
            self._full = True
            log.warning(
                "there is no memory for gradients that others on this host can read in place; they are sent over the "
                "network instead, which is slower: give this host or container more memory",
                error=str(error),
            )
            return None
        self._taken += 1
        return in_slot(self._arena, self.memory.view, self._taken - 1)


def in_slot(arena: Arena, inbox: memoryview, number: int) -> FlatSpace:
    """The contribution in a slot of an inbox, without a copy."""
    base = number * arena.slot_bytes

    def place(segment: Segment) -> torch.Tensor:
        start = base + arena.starts[segment.index]
        nbytes = segment.elements * ITEMSIZE[segment.dtype]
        return tensor_from(inbox[start : start + nbytes], segment.dtype)

    return FlatSpace(arena.layout, torch.device("cpu"), (Kind.PARAMETER, Kind.BUFFER), place, number)
