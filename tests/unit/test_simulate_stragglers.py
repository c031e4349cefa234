"""Stragglers, and the recursion of bounded staleness: the figures that are known for eight workers."""

from __future__ import annotations

from itertools import islice
from math import inf
from statistics import fmean

import pytest

from paramserver.errors import ConfigError
from paramserver.simulate.parts.stragglers import draws, parse
from tests.support.unit import maxplus

WORKERS, STEPS, SEEDS = 8, 1000, 5


def times(text: str, workers: int, steps: int, seed: int) -> list[list[float]]:
    """What each slice takes, by slice and worker."""
    rows = [draws([parse(text)], worker, workers, seed) for worker in range(workers)]
    return [list(row) for row in islice(zip(*rows, strict=True), steps)]


# Slices per second relative to a barrier after every step, for staleness 1, 3, 10 and without a bound.
@pytest.mark.parametrize(
    ("text", "expected", "within"),
    [
        ("normal:0.05", (1.07, 1.07, 1.07, 1.07), 0.02),
        ("lognormal:0.25", (1.30, 1.35, 1.38, 1.39), 0.03),
        ("exp:0.3", (1.35, 1.44, 1.48, 1.50), 0.03),
        ("exp:1", (1.50, 1.95, 2.38, 2.74), 0.04),
        ("pareto:2.5", (1.37, 1.65, 1.86, 2.07), 0.06),
        ("rare:0.02x5", (1.11, 1.29, 1.42, 1.50), 0.05),
        ("slow:1x2", (1.00, 1.00, 1.00, 1.88), 0.01),
        ("bursts:3x20", (1.02, 1.07, 1.16, 1.64), 0.08),
    ],
)
def test_gain_of_staleness_is_what_is_known(text: str, expected: tuple[float, ...], within: float) -> None:
    gains = []
    for seed in range(SEEDS):
        drawn = times(text, WORKERS, STEPS, seed)
        barrier = maxplus.rate(drawn, 0)
        gains.append([maxplus.rate(drawn, staleness) / barrier for staleness in (1, 3, 10, None)])
    mean = [fmean(column) for column in zip(*gains, strict=True)]
    assert mean == pytest.approx(expected, rel=within)


def test_staleness_zero_waits_for_the_slowest_of_each_step() -> None:
    drawn = times("exp:1", WORKERS, 50, seed=1)
    assert maxplus.ends(drawn, 0)[-1] == pytest.approx(
        [sum(max(row) for row in drawn[:-1]) + last for last in drawn[-1]]
    )


def test_without_a_bound_nobody_waits() -> None:
    drawn = times("exp:1", WORKERS, 50, seed=1)
    assert maxplus.ends(drawn, None)[-1] == pytest.approx([sum(column) for column in zip(*drawn, strict=True)])


@pytest.mark.parametrize("text", ["normal:0.05", "lognormal:0.25", "exp:0.3", "exp:1", "pareto:2.5"])
def test_the_mean_of_a_distribution_is_one(text: str) -> None:
    assert fmean(islice(draws([parse(text)], 0, 1, 7), 20_000)) == pytest.approx(1.0, abs=0.03)


def test_same_words_same_numbers_and_each_worker_its_own() -> None:
    first, again, other = (list(islice(draws([parse("exp:1")], worker, 2, 3), 5)) for worker in (0, 0, 1))
    assert first == again != other


def test_stragglers_multiply() -> None:
    both = [parse("slow:1x2"), parse("slow:2x3")]
    assert [next(draws(both, worker, 3, 0)) for worker in range(3)] == [1.0, 3.0, 6.0]


def test_a_burst_has_its_length() -> None:
    row = list(islice(draws([parse("bursts:3x20@0.01")], 0, 1, 1), 2000))
    begins = row.index(3.0)
    assert row[begins : begins + 20] == [3.0] * 20
    assert set(row) == {1.0, 3.0}


@pytest.mark.parametrize(
    "text",
    ["", "exp", "exp:2", "exp:-1", "exp:x", "pareto:1", "slow:1", "slow:1.5x2", "rare:2x5", "bursts:3x20@2", "odd:1"],
)
def test_what_is_no_straggler_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not understood; it must be normal:CV"):
        parse(text)


def test_infinite_times_are_refused() -> None:
    with pytest.raises(ConfigError):
        parse(f"slow:1x{inf}")
