"""Handed in = counted + named exceptions: what is said where the two sides do not agree."""

from __future__ import annotations

from paramserver.core.job.tally import Shard, Tally, imbalances, not_counted


def test_everything_has_a_name() -> None:
    workers = [Tally("worker-0", 10, 7, late=1, duplicate=2), Tally("worker-1", 5, 5)]
    assert imbalances(workers, [Shard("server-0", 12), Shard("server-1", 12)]) == []
    assert imbalances([], [Shard("server-0", 0)]) == []
    assert not_counted(workers) == {"duplicate": 2, "late": 1}


def test_acknowledged_and_in_no_version() -> None:
    (said,) = imbalances([Tally("worker-0", 10, 10)], [Shard("server-0", 9)])
    assert said == "1 contributions were acknowledged to workers, but are in no version."


def test_counted_that_nobody_handed_in() -> None:
    (said,) = imbalances([Tally("worker-0", 3, 3)], [Shard("server-0", 4)])
    assert "1 contributions were counted that no worker knows of" in said


def test_a_lost_worker_may_have_handed_in_more_than_it_reported_never_less() -> None:
    assert imbalances([Tally("worker-0", 3, 3, lost=True)], [Shard("server-0", 5)]) == []
    assert imbalances([Tally("worker-0", 3, 3, lost=True)], [Shard("server-0", 2)])


def test_never_answered() -> None:
    (said,) = imbalances([Tally("worker-0", 4, 3)], [Shard("server-0", 3)])
    assert said == "1 contributions of worker-0 were never answered."
    assert imbalances([Tally("worker-0", 4, 3, lost=True)], [Shard("server-0", 3)]) == []


def test_a_step_that_is_never_completed() -> None:
    (said,) = imbalances([Tally("worker-0", 5, 5)], [Shard("server-0", 4, open=1), Shard("server-1", 4, open=1)])
    assert said.startswith("1 contributions are not counted: they are of a step that was never completed")


def test_servers_that_differ() -> None:
    said = imbalances([Tally("worker-0", 4, 4)], [Shard("server-0", 4), Shard("server-1", 3)])
    assert said[0] == "the servers have not counted the same number of contributions (server-0 4, server-1 3)."
