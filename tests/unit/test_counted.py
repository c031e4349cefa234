"""Slices by epoch as runs: what they say, and that a long history stays small."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paramserver.core.versions.counted import Counted, Run, Runs, in_all, of_one, united

Slices = set[tuple[int, int]]


def slices_of(runs: Runs) -> Slices:
    return {
        (epoch, index)
        for first, epochs, ranges in runs
        for epoch in range(first, first + epochs)
        for lo, hi in ranges
        for index in range(lo, hi)
    }


def some(chance: random.Random) -> tuple[Runs, Slices]:
    """Mostly whole epochs of four slices, in any order."""
    counted, told = Counted(), Slices()
    for _ in range(chance.randrange(120)):
        name = chance.randrange(12), chance.randrange(4)
        counted.add(*name)
        told.add(name)
    return counted.runs(), told


@pytest.mark.parametrize("seed", range(50))
def test_runs_say_what_was_put_in(seed: int) -> None:
    chance = random.Random(seed)
    (one, told), (other, told_too) = some(chance), some(chance)
    assert slices_of(one) == told
    assert all(Counted(one).has(epoch, index) == ((epoch, index) in told) for epoch in range(13) for index in range(5))
    assert Counted(one).runs() == one
    for before, after in pairwise(one):
        apart = before.first + before.epochs < after.first
        assert apart or (before.first + before.epochs == after.first and before.ranges != after.ranges)
    assert united([one, other]) == Counted(sorted(united([other, one]))).runs()
    assert slices_of(united([one, other])) == told | told_too
    assert slices_of(in_all([one, other])) == told & told_too


def test_a_million_finished_epochs_are_one_run() -> None:
    counted = Counted([(0, 10**6, [(0, 2)])])
    counted.add(10**6, 1)
    assert len(counted.runs()) == 2
    counted.add(10**6, 0)
    assert counted.runs() == (Run(0, 10**6 + 1, ((0, 2),)),)
    counted.add(500, 7)  # a slice that nobody expected
    assert [run.epochs for run in counted.runs()] == [500, 1, 10**6 - 500]
    assert united([counted.runs(), of_one(500, [(2, 7)])])[1] == Run(500, 1, ((0, 8),))


@pytest.mark.parametrize(
    "runs",
    [[(0, 0, [(0, 1)])], [(3, 2, [(0, 1)]), (4, 1, [(0, 1)])], [(-1, 1, [(0, 1)])], [(0, 1, [(2, 1)])]],
)
def test_runs_that_are_none_are_refused(runs: list[tuple[int, int, list[tuple[int, int]]]]) -> None:
    with pytest.raises(ValueError, match=r"follow|no range"):
        Counted(runs)


def test_numbers_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="below 0"):
        Counted().add(-1, 0)
