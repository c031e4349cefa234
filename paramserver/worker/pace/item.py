"""One slice that a worker is to compute."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.core.versions.names import Name


@dataclass(frozen=True, slots=True)
class Item:
    """One slice to compute: its name, and where it lies in the data.

    ``unplanned``: the slice was stolen, or is not the next one of the worker's own range.
    """

    name: Name
    epoch: int
    index: int
    unplanned: bool = False
