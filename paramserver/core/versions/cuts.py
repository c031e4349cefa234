"""One state of all shards for readers of an asynchronous job: how shards that apply in different orders come to agree.

A *cut* is a set of contributions, and of each shard the version that holds them and no others. Shards apply in the
order of arrival, so versions of the same number need not be a cut. To make one, all shards stop applying and say what
they have applied; then each applies what another one has and it has not, keeps that version for readers, and goes on.
Workers compute meanwhile. Only contributions that arrive in this moment wait, for two messages there and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from paramserver.core.versions.counted import Runs, segments
from paramserver.core.versions.names import AsyncName, Name
from paramserver.core.versions.ranges import RangeSet, minus

# More than this can hardly be under way; a shard that lacks so many has to catch up first.
MOST_MISSING = 10_000
_MARK_BYTES = 16
_MARK_MASK = (1 << 8 * _MARK_BYTES) - 1


@dataclass(slots=True)
class Cut:
    """The newest cut of one shard: begun (``only`` is empty), aimed at, then kept as version ``kept`` or given up.

    ``only``: the contributions that may be applied; None: all.
    """

    number: int = 0
    only: set[Name] | None = None
    kept: int | None = None

    def begin(self, number: int) -> None:
        """Nothing is applied any more."""
        self.number, self.only, self.kept = number, set(), None

    def aim(self, number: int, missing: Iterable[Name], version: int) -> None:
        """These are applied, and no others. ``version``: the newest one, with nothing in the making."""
        if self.number == number and self.only is not None:
            self.only = set(missing)
            self._reached(version)

    def built(self, names: Iterable[Name], version: int) -> None:
        """A version was made of these."""
        if self.only:
            self.only.difference_update(names)
            self._reached(version)

    def _reached(self, version: int) -> None:
        if not self.only:
            self.only, self.kept = None, version

    def end(self, number: int) -> None:
        """Everything is applied again, and no version is kept."""
        if self.number == number:
            self.number, self.only, self.kept = 0, None, None


class Marks:
    """A digest of the contributions that a version holds, whatever their order: equal ones hold the same."""

    def __init__(self) -> None:
        self._newest = 0
        self._by_version: dict[int, int] = {}

    def built(self, names: Iterable[Name], version: int) -> None:
        """A version was made of these."""
        for name in names:
            if isinstance(name, AsyncName):  # of a synchronous step all versions hold the same
                digest = hashlib.blake2b(b"%d/%d" % (name.epoch, name.index), digest_size=_MARK_BYTES).digest()
                self._newest = self._newest + int.from_bytes(digest) & _MARK_MASK
        self._by_version[version] = self._newest

    def of(self, version: int) -> bytes:
        """The digest of a version that is kept; of the first of a timeline it is zero."""
        return self._by_version.get(version, 0).to_bytes(_MARK_BYTES)

    def drop(self, version: int) -> None:
        """The version is no longer kept."""
        self._by_version.pop(version, None)

    def restore(self, version: int, mark: bytes) -> None:
        """Begin with a version whose digest another server of this shard has told."""
        self._newest = self._by_version[version] = int.from_bytes(mark)


def lacking(target: Runs, counted: Runs) -> frozenset[AsyncName] | None:
    """The slices of ``target`` that ``counted`` lacks. None if ``counted`` has others, or lacks too many."""
    gaps: list[tuple[int, int, RangeSet]] = []
    missing = 0
    for first, epochs, (wanted, done) in segments([target, counted]):
        if minus(done, wanted):
            return None
        gaps.append((first, epochs, minus(wanted, done)))
        missing += epochs * len(gaps[-1][2])
        if missing > MOST_MISSING:
            return None
    return frozenset(
        AsyncName(epoch, index)
        for first, epochs, gap in gaps
        for lo, hi in gap.ranges()
        for epoch in range(first, first + epochs)
        for index in range(lo, hi)
    )
