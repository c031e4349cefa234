"""Slice positions that stay with a worker, and the steps in which it keeps nothing of them."""

from __future__ import annotations

import pytest

from paramserver.core.work.positions import fixed_share, flushes
from paramserver.core.work.slices import SyncSchedule


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_short_steps_leave_positions_where_they_are(workers: int) -> None:
    """Together the shares cover a step, and nobody gets a position that is another's in a full step."""
    full = [fixed_share(4, 4, rank, workers) for rank in range(workers)]
    assert [p for lo, hi in full for p in range(lo, hi)] == [0, 1, 2, 3]
    for of in (1, 2, 3):
        shares = [fixed_share(of, 4, rank, workers) for rank in range(workers)]
        assert [p for lo, hi in shares for p in range(lo, hi)] == list(range(of))
        assert all(set(range(*short)) <= set(range(*whole)) for short, whole in zip(shares, full, strict=True))


def test_nothing_is_left_at_checkpoints_and_at_the_end_of_an_epoch() -> None:
    """An epoch of eleven slices, four per step: the third step has three."""
    schedule = SyncSchedule(11, 4)
    found = [[flushes(schedule, version, position, 4) for position in range(4)] for version in range(6)]
    nothing, everything = [False] * 4, [True] * 4
    assert found[0] == nothing
    assert found[1] == [False, False, False, True]  # the next step has no position 3
    assert found[2][:3] == [True, True, True]  # the end of the epoch
    assert found[3] == everything  # makes version 4
    assert found[4] == [False, False, False, True]
    assert found[5][:3] == [True, True, True]


def test_without_a_data_set_only_the_count_matters() -> None:
    schedule = SyncSchedule(0, 2)
    assert [flushes(schedule, version, 1, 3) for version in range(6)] == [False, False, True, False, False, True]
