"""RangeSet against a plain set, and its promise to stay small."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.versions.ranges import RangeSet

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1])), max_size=25)


@settings(max_examples=150, deadline=None)
@given(RANGES)
def test_behaves_like_a_set_and_keeps_few_ranges(added: list[tuple[int, int]]) -> None:
    plain: set[int] = set()
    kept = RangeSet()
    for lo, hi in added:
        new = set(range(lo, hi)) - plain
        plain |= new
        assert kept.add_range(lo, hi) == len(new)
        assert len(kept) == len(plain)
        assert bool(kept) == bool(plain)
    assert [number for lo, hi in kept.ranges() for number in range(lo, hi)] == sorted(plain)
    assert all(before[1] < after[0] for before, after in pairwise(kept.ranges())), "neighbours are joined"
    assert [number in kept for number in range(-1, 70)] == [number in plain for number in range(-1, 70)]
    for of in (0, 1, 30, 61, 80):
        assert [i for lo, hi in kept.missing(of) for i in range(lo, hi)] == sorted(set(range(of)) - plain)


@settings(max_examples=50, deadline=None)
@given(RANGES, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(added: list[tuple[int, int]], random: object) -> None:
    shuffled = list(added)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert RangeSet.from_ranges(shuffled) == RangeSet.from_ranges(added)


def test_add_tells_whether_the_number_is_new() -> None:
    kept = RangeSet()
    assert [kept.add(3), kept.add(3), kept.add(5), kept.add(4)] == [True, False, True, True]
    assert kept.ranges() == ((3, 6),)
    assert repr(kept) == "RangeSet(3-5)"


def test_a_long_history_is_one_range() -> None:
    kept = RangeSet()
    for number in range(0, 20_000, 2):
        kept.add(number)
    for number in range(1, 20_000, 2):
        kept.add(number)
    assert kept.ranges() == ((0, 20_000),)


def test_large_numbers_cost_nothing() -> None:
    kept = RangeSet.from_ranges([(0, 10**12), (10**12 + 1, 10**15)])
    assert kept.missing(10**16) == ((10**12, 10**12 + 1), (10**15, 10**16))
    assert 10**12 not in kept
    assert 10**14 in kept


def test_only_ranges_from_zero_up() -> None:
    for lo, hi in ((-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="0 <= lo <= hi"):
            RangeSet().add_range(lo, hi)


def test_a_set_is_not_equal_to_something_else() -> None:
    assert RangeSet() != ()
    assert RangeSet.from_ranges([(1, 2)]) != RangeSet.from_ranges([(1, 3)])
