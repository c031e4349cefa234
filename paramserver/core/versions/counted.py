"""Slices by epoch. Neighbouring epochs that have the same slices are kept together, as a run.

Finished epochs have the same slices, so a long history stays as small as a short one: in memory, in messages and in
checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from paramserver.core.versions.ranges import RangeSet, common


class Run(NamedTuple):
    """``epochs`` epochs from ``first`` on. Each of them has the slices ``ranges`` (half-open, sorted, apart)."""

    first: int
    epochs: int
    ranges: tuple[tuple[int, int], ...]


Runs = tuple[Run, ...]


def of_one(epoch: int, ranges: Iterable[tuple[int, int]]) -> Runs:
    """The slices of one epoch.

    >>> of_one(3, [(0, 2)])
    (Run(first=3, epochs=1, ranges=((0, 2),)),)
    """
    return Counted([(epoch, 1, ranges)]).runs()


class Counted:
    """Slices by epoch. Equal sets give equal :meth:`runs`.

    Raises ValueError for ``runs`` that overlap, are not sorted, or have no epoch, and for ranges that are none.
    """

    __slots__ = ("_ends", "_firsts", "_slices")

    def __init__(self, runs: Iterable[tuple[int, int, Iterable[tuple[int, int]]]] = ()) -> None:
        # Run i has the epochs [firsts[i], ends[i]); none is without slices, and neighbours differ.
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._slices: list[RangeSet] = []
        at = 0
        for first, epochs, ranges in runs:
            if first < at or epochs < 1:
                raise ValueError(f"{epochs} epochs from epoch {first} on do not follow those before epoch {at}")
            at = first + epochs
            slices = RangeSet.from_ranges(ranges)
            if slices:
                self._insert(len(self._firsts), first, at, slices)
                self._join(len(self._firsts) - 1)

    def runs(self) -> Runs:
        """All slices, sorted, in as few runs as possible."""
        return tuple(
            Run(first, end - first, slices.ranges())
            for first, end, slices in zip(self._firsts, self._ends, self._slices, strict=True)
        )

    def has(self, epoch: int, index: int) -> bool:
        """Whether this slice is in the set."""
        at = bisect_right(self._firsts, epoch) - 1
        return at >= 0 and epoch < self._ends[at] and index in self._slices[at]

    def add(self, epoch: int, index: int) -> None:
        """Put a slice in. Raises ValueError if a number is negative."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch} is below 0")
        at = bisect_right(self._firsts, epoch) - 1
        if at >= 0 and epoch < self._ends[at]:
            if index in self._slices[at]:
                return
            at = self._part(at, epoch)
        else:
            at += 1
            self._insert(at, epoch, epoch + 1, RangeSet())
        self._slices[at].add(index)
        self._join(at)

    def _insert(self, at: int, first: int, end: int, slices: RangeSet) -> None:
        self._firsts.insert(at, first)
        self._ends.insert(at, end)
        self._slices.insert(at, slices)

    def _part(self, at: int, epoch: int) -> int:
        """Make a run of its own for an epoch of run ``at``; its place."""
        first, end, slices = self._firsts[at], self._ends[at], self._slices[at]
        if epoch + 1 < end:
            self._insert(at + 1, epoch + 1, end, RangeSet.from_ranges(slices.ranges()))
            self._ends[at] = epoch + 1
        if first < epoch:
            self._insert(at, first, epoch, RangeSet.from_ranges(slices.ranges()))
            at += 1
            self._firsts[at] = epoch
        return at

    def _join(self, at: int) -> None:
        """Join run ``at`` with its neighbours, if they have the same slices."""
        for left in (at, at - 1):
            if left < 0 or left + 1 >= len(self._firsts) or self._ends[left] != self._firsts[left + 1]:
                continue
            one, other = self._slices[left], self._slices[left + 1]
            if len(one) == len(other) and one == other:
                self._ends[left] = self._ends[left + 1]
                del self._firsts[left + 1], self._ends[left + 1], self._slices[left + 1]


def segments(sets: Sequence[Runs], at: Iterable[int] = ()) -> Iterator[tuple[int, int, list[RangeSet]]]:
    """Go through the epochs of all sets: the first epoch, how many are alike in each set, and their slices by set.

    Epochs that no set has are left out. ``at``: a segment begins at each of these epochs.
    """
    cuts = sorted({*at, *(cut for runs in sets for run in runs for cut in (run.first, run.first + run.epochs))})
    places = [0] * len(sets)
    made: dict[tuple[int, int], RangeSet] = {}
    for first, end in pairwise(cuts):
        found = []
        for number, runs in enumerate(sets):
            while places[number] < len(runs) and runs[places[number]].first + runs[places[number]].epochs <= first:
                made.pop((number, places[number]), None)
                places[number] += 1
            place = places[number]
            if place < len(runs) and runs[place].first <= first:
                key = number, place
                if key not in made:
                    made[key] = RangeSet.from_ranges(runs[place].ranges)
                found.append(made[key])
            else:
                found.append(RangeSet())
        if any(found):
            yield first, end - first, found


def united(shards: Sequence[Runs]) -> Runs:
    """The slices that at least one of the shards has counted."""
    return Counted(
        (first, epochs, [part for done in found for part in done.ranges()]) for first, epochs, found in segments(shards)
    ).runs()


def in_all(shards: Sequence[Runs]) -> Runs:
    """The slices that all of the shards, at least one, have counted."""
    return Counted((first, epochs, common(found).ranges()) for first, epochs, found in segments(shards)).runs()
