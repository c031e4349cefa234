"""Contributions that shards have counted, and that may be in no version yet.

A shard that moves to another server has all published versions there, and not the contributions of the open step. So
the worker keeps these, and brings them again to a shard that has moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Kept(Generic[T]):
    step: int
    content: T
    shards: set[int] = field(default_factory=set)


class Unpublished(Generic[T]):
    """Synchronous contributions by their nonce. Belongs to one thread, but for :meth:`published`."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept[T]] = {}
        # Steps below this number are in a version that all shards have published.
        self._published = 0

    def counted(self, nonce: int, step: int, shard: int, content: T) -> None:
        """The present server of ``shard`` has counted a contribution."""
        for old in [number for number, kept in self._kept.items() if kept.step < self._published]:
            del self._kept[old]
        if step >= self._published:
            self._kept.setdefault(nonce, _Kept(step, content)).shards.add(shard)

    def published(self, version: int) -> None:
        """All shards have published ``version``: contributions to earlier steps are safe. From any thread."""
        self._published = max(self._published, version)

    def dropped(self, nonce: int) -> None:
        """The contribution was given up, and its memory is used for something else."""
        self._kept.pop(nonce, None)

    def moved(self, shard: int) -> list[T]:
        """``shard`` has moved: the contributions to bring there again. They do not count there until they have come."""
        found = []
        for kept in self._kept.values():
            if shard in kept.shards and kept.step >= self._published:
                kept.shards.discard(shard)
                found.append(kept.content)
        return found
