"""What tests ask of a table of slice leases."""

from __future__ import annotations

from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import SliceLeases


def names(epoch: int, *indices: int) -> list[AsyncName]:
    """These slices of an epoch."""
    return [AsyncName(epoch, index) for index in indices]


def all_of(leases: SliceLeases, worker: int, max_epoch: int) -> list[AsyncName]:
    """Everything there is to have."""
    taken: list[AsyncName] = []
    while more := leases.lease(worker, max_epoch, 1000, 1):
        taken.extend(more)
    return taken


def done_in(leases: SliceLeases, epoch: int) -> int:
    """How many slices of the epoch are done; of epochs without end, how many of the first hundred."""
    return sum(map(leases.is_done, names(epoch, *range(leases.slices_per_epoch or 100))))
