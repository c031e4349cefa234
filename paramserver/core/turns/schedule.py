"""Which slices a synchronous step has if several optimizer steps, the turns, are made on each batch: pure functions.

Slice ``batch * turns + turn`` is a turn on a batch. A step looks at the first ``batches`` batches of the epoch of which
some turn is left. It has the earliest turn that is left of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def next_turn(ranges: Sequence[Range], turns: int, batches: int) -> tuple[int, ...]:
    """The slices of the next step; ``ranges``: the slices that are left, not empty.

    >>> next_turn([(0, 6)], turns=2, batches=2)
    (0, 2)
    >>> next_turn([(1, 2), (3, 6)], turns=2, batches=2)
    (1, 3)
    """
    group, _ = _group(ranges, turns, batches)
    turn = min(slice_ % turns for slice_ in group)
    return tuple(slice_ for slice_ in group if slice_ % turns == turn)


def after_turns(ranges: Ranges, turns: int, batches: int, steps: int) -> Ranges:
    """The slices that are left after so many steps.

    >>> after_turns(((0, 6),), turns=2, batches=2, steps=1)
    ((1, 2), (3, 6))
    >>> after_turns(((0, 6),), turns=2, batches=2, steps=2)
    ((4, 6),)
    """
    while steps:
        if whole := _whole_groups(ranges, turns, batches):
            passed = min(whole, steps // turns)
            ranges, steps = _cut(ranges, passed * batches * turns), steps - passed * turns
            if not steps:
                break
        ranges, steps = _after_one(ranges, turns, batches), steps - 1
    return ranges


def steps_with_turns(ranges: Ranges, turns: int, batches: int) -> int:
    """How many steps there are for these slices.

    >>> steps_with_turns(((1, 2), (3, 6)), turns=2, batches=2)
    3
    """
    steps = 0
    while ranges:
        if whole := _whole_groups(ranges, turns, batches):
            ranges, steps = _cut(ranges, whole * batches * turns), steps + whole * turns
            continue
        ranges, steps = _after_one(ranges, turns, batches), steps + 1
    return steps


def _after_one(ranges: Ranges, turns: int, batches: int) -> Ranges:
    """The slices that are left after the next step."""
    group, rest = _group(ranges, turns, batches)
    done = set(next_turn(ranges, turns, batches))
    return _joined((*((slice_, slice_ + 1) for slice_ in group if slice_ not in done), *rest))


def _whole_groups(ranges: Sequence[Range], turns: int, batches: int) -> int:
    """How often ``batches`` batches with all their turns lie at the beginning, and need no closer look."""
    lo, hi = ranges[0] if ranges else (0, 0)
    return 0 if lo % turns else (hi - lo) // (batches * turns)


def _cut(ranges: Ranges, count: int) -> Ranges:
    """The ranges without the first ``count`` slices, which are in the first range."""
    lo, hi = ranges[0]
    return ranges[1:] if lo + count == hi else ((lo + count, hi), *ranges[1:])


def _group(ranges: Sequence[Range], turns: int, batches: int) -> tuple[list[int], Ranges]:
    """The slices of the first ``batches`` batches, and the ranges after them."""
    group: list[int] = []
    last = found = -1
    for number, (lo, hi) in enumerate(ranges):
        for slice_ in range(lo, hi):
            if slice_ // turns != last:
                last, found = slice_ // turns, found + 1
            if found == batches:
                return group, ((slice_, hi), *ranges[number + 1 :])
            group.append(slice_)
    return group, ()


def _joined(ranges: Ranges) -> Ranges:
    """The same slices in as few ranges as possible."""
    joined: list[Range] = []
    for lo, hi in ranges:
        if joined and joined[-1][1] == lo:
            joined[-1] = joined[-1][0], hi
        else:
            joined.append((lo, hi))
    return tuple(joined)
