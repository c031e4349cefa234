"""What the training loop needs of a mode: the next slice, and somebody who takes in what it yields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paramserver.core.versions.names import Name
from paramserver.v1 import types_pb2
from paramserver.worker.flat import PartialSum


@dataclass(frozen=True, slots=True)
class Item:
    """One slice to compute: its name, and where it lies in the data. ``unplanned``: not a slice
    of the worker's own range in its order, but a stolen one.
    """

    name: Name
    epoch: int
    index: int
    unplanned: bool = False


class Pace(Protocol):
    """Hands out this worker's slices and takes in what they yield."""

    def next(self, epoch: int, last: bool) -> Item | None:
        """The slice to compute now; None when there is none up to ``epoch``. ``last``: no later epoch will be asked."""

    def ahead(self, epoch: int) -> Iterator[Item]:
        """The slices that are likely to come, beginning with the present one: for loading data ahead of time."""

    def expects(self, item: Item) -> bool:
        """Whether what the slice yields can be handed in now; another worker may have done it meanwhile."""

    def alone(self, item: Item) -> bool:
        """Whether what the slice yields is pushed as it is, with nothing added up to it."""

    def contribute(self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Hand in what the slice yielded; returns when this worker may begin the next slice.

        False: without a data set, another worker's contribution of this name counts instead.
        """

    @property
    def unsent(self) -> int:
        """How many slices have been handed in here and are not sent."""

    def finish(self) -> None:
        """Wait until everything handed in has arrived, and say so to whom it concerns."""
