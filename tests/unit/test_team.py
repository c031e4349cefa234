"""Several threads do what one would: same results in the same order, and the first error."""

from __future__ import annotations

import threading

import pytest

from paramserver.core.layout.thresholds import server_threads
from paramserver.server.team import Team

THREADS = [1, 2, 5]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("items", [0, 1, 2, 40])
def test_results_are_in_order(threads: int, items: int) -> None:
    team = Team(threads)
    assert team.each(lambda number: number * number, range(items)) == [number * number for number in range(items)]
    team.close()


def test_two_threads_are_at_work_at_once() -> None:
    """Each waits until the other one has begun."""
    team, both = Team(2), threading.Barrier(2)
    team.each(lambda _: both.wait(10.0), range(2))
    team.close()


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_ends_the_work(threads: int) -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise ValueError("three")

    team = Team(threads)
    with pytest.raises(ValueError, match="three"):
        team.each(work, range(1000))
    assert threads > 1 or begun == [0, 1, 2, 3]
    assert team.each(lambda number: number, [7, 8]) == [7, 8]
    team.close()


def test_none_is_an_item_like_any_other() -> None:
    team = Team(3)
    assert team.each(lambda item: item, [None, 1, None]) == [None, 1, None]
    team.close()


def test_a_machine_is_shared() -> None:
    assert server_threads(64, 10_000) == 1
    assert [server_threads(cores, 2) for cores in (2, 6, 64)] == [1, 3, 8]
