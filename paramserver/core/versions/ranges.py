"""A set of whole numbers, kept as half-open ranges, so that a long history of finished slices stays small."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence


class RangeSet:
    """A set of numbers from 0 up. Its memory grows with the number of gaps, never with the number of members."""

    __slots__ = ("_count", "_starts", "_stops")

    def __init__(self) -> None:
        # Range i is [starts[i], stops[i]); ranges are sorted, not empty, and never touch each other.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0

    @classmethod
    def from_ranges(cls, ranges: Iterable[tuple[int, int]]) -> RangeSet:
        """The union of half-open ranges, in any order, overlapping or not. Raises ValueError as `add_range` does."""
        made = cls()
        for lo, hi in ranges:
            made.add_range(lo, hi)
        return made

    def add(self, number: int) -> bool:
        """Put one number in; False if it was there already. Raises ValueError if it is negative."""
        return self.add_range(number, number + 1) > 0

    def add_range(self, lo: int, hi: int) -> int:
        """Put ``[lo, hi)`` in; return how many of its numbers are new. Raises ValueError unless 0 <= lo <= hi."""
        if not 0 <= lo <= hi:
            raise ValueError(f"[{lo}, {hi}) is no range of numbers from 0 up: give 0 <= lo <= hi")
        if lo == hi:
            return 0
        # Ranges first..last-1 overlap or touch the new one; they and it become a single range.
        first = bisect_left(self._stops, lo)
        last = bisect_right(self._starts, hi)
        gone = sum(self._stops[first:last]) - sum(self._starts[first:last])
        if first < last:
            lo, hi = min(lo, self._starts[first]), max(hi, self._stops[last - 1])
        self._starts[first:last] = [lo]
        self._stops[first:last] = [hi]
        new = hi - lo - gone
        self._count += new
        return new

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The members as half-open ranges, sorted, as few as possible."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def missing(self, of: int) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of ``[0, of)`` that are not in the set, sorted."""
        below = bisect_left(self._starts, of)
        return tuple(complement(zip(self._starts[:below], self._stops[:below], strict=True), of))

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self._stops[i]

    def __len__(self) -> int:
        """How many numbers are members (not how many ranges)."""
        return self._count

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return self.ranges() == other.ranges() if isinstance(other, RangeSet) else NotImplemented

    def __repr__(self) -> str:
        return f"RangeSet({', '.join(f'{lo}-{hi - 1}' for lo, hi in self.ranges())})"


def complement(ranges: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The parts of [0, end) outside the given ascending ranges."""
    gaps, start = [], 0
    for lo, hi in (*ranges, (end, end)):
        if start < lo:
            gaps.append((start, lo))
        start = hi
    return gaps


def minus(ranges: RangeSet, others: RangeSet) -> RangeSet:
    """The numbers that are in the first set and not in the second."""
    end = ranges.ranges()[-1][1] if ranges else 0
    return common([ranges, RangeSet.from_ranges(others.missing(end))]) if end else RangeSet()


def common(sets: Sequence[RangeSet]) -> RangeSet:
    """The numbers that are in all sets. There is at least one set."""
    end = min(one.ranges()[-1][1] if one else 0 for one in sets)
    lacking = RangeSet.from_ranges(gap for one in sets for gap in one.missing(end))
    return RangeSet.from_ranges(lacking.missing(end))
