"""Settings, gates and combines by themselves; what a shard makes of them is in test_shard."""

from __future__ import annotations

import pytest

from paramserver.core.versions.consistency import (
    Batch,
    Bounded,
    Consistency,
    History,
    Missing,
    Mode,
    Offer,
    PerContribution,
    PerStep,
    Policies,
    Verdict,
)
from paramserver.core.versions.names import AsyncName, SyncName

ACCEPTED, DUPLICATE = Offer(Verdict.ACCEPTED), Offer(Verdict.DUPLICATE)


def test_a_negative_staleness_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more, or unbounded, not -1"):
        Consistency(Mode.ASYNC, -1)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (Consistency(Mode.SYNC), "sync"),
        (Consistency(Mode.ASYNC, 0), "async with staleness 0"),
        (Consistency(Mode.ASYNC), "async with staleness unbounded"),
    ],
)
def test_settings_in_words(setting: Consistency, text: str) -> None:
    assert str(setting) == text


def test_a_setting_chooses_both_policies() -> None:
    both = Policies(Consistency(Mode.SYNC, 3), History())
    assert (both.gate, type(both.combine)) == (None, PerStep)
    both = Policies(Consistency(Mode.ASYNC, 3), History())
    assert (both.gate, type(both.combine)) == (Bounded(3), PerContribution)


def test_another_bound_leaves_queued_contributions_in_the_queue() -> None:
    both = Policies(Consistency(Mode.ASYNC, 3), History())
    before = both.combine
    assert not both.change(Consistency(Mode.ASYNC, 1))
    assert (both.gate, both.combine) == (Bounded(1), before)
    assert both.change(Consistency(Mode.SYNC))
    assert (both.gate, type(both.combine)) == (None, PerStep)


@pytest.mark.parametrize(
    ("staleness", "clock", "slowest", "admitted"),
    [(0, 0, 0, True), (0, 1, 0, False), (0, 1, 1, True), (3, 3, 0, True), (3, 4, 0, False), (None, 1000, 0, True)],
)
def test_the_bound_is_on_the_distance_to_the_slowest(
    staleness: int | None, clock: int, slowest: int, admitted: bool
) -> None:
    assert Bounded(staleness).admits(clock, slowest) is admitted


def test_a_step_is_taken_once_and_only_when_it_is_complete() -> None:
    history = History()
    combine = PerStep(history)
    assert combine.missing() == Missing(0, (), 0)
    assert combine.offer(SyncName(0, 2, 3, 3), 12) == ACCEPTED
    assert combine.take() is None
    assert combine.missing() == Missing(0, ((0, 2),), 3)
    assert combine.offer(SyncName(0, 0, 2, 3), 10) == ACCEPTED
    assert combine.take() == Batch((SyncName(0, 0, 2, 3), SyncName(0, 2, 3, 3)), (10, 12))
    assert combine.take() is None
    assert combine.missing() is None
    history.version = 1
    combine.built()
    assert combine.offer(SyncName(0, 0, 2, 3), 13) == DUPLICATE
    assert combine.missing() == Missing(1, (), 0)


def test_dropped_buffers_are_named() -> None:
    combine = PerStep(History())
    combine.offer(SyncName(0, 0, 1, 4), 10)
    combine.offer(SyncName(0, 1, 2, 4), 11)
    assert combine.offer(SyncName(0, 2, 3, 4), 12) == ACCEPTED
    assert combine.offer(SyncName(0, 0, 4, 4), 13) == Offer(Verdict.ACCEPTED, dropped=(10, 11, 12))
    batch = combine.take()
    assert batch is not None
    assert (batch.buffers, batch.slices) == ((13,), 4)


def test_contributions_become_versions_in_order_of_arrival() -> None:
    history = History()
    combine = PerContribution(history)
    assert combine.take() is None
    assert combine.offer(AsyncName(1, 5), 10) == ACCEPTED
    assert combine.offer(AsyncName(0, 7), 11) == ACCEPTED
    assert combine.take() == Batch((AsyncName(1, 5),), (10,))
    assert combine.take() is None, "one batch is out at a time"
    assert combine.offer(AsyncName(1, 5), 12) == Offer(Verdict.QUEUED, first=10)
    assert combine.offer(AsyncName(0, 7), 12) == Offer(Verdict.QUEUED, first=11)
    assert not history.has(AsyncName(1, 5))
    combine.built()
    assert history.has(AsyncName(1, 5))
    assert combine.offer(AsyncName(1, 5), 13) == DUPLICATE
    assert combine.take() == Batch((AsyncName(0, 7),), (11,))
    assert combine.missing() is None


def test_history_grows_with_gaps_and_not_with_contributions() -> None:
    history = History()
    combine = PerContribution(history)
    for index in range(10_000):
        combine.offer(AsyncName(0, index), index)
        combine.take()
        combine.built()
    assert history.slices_done.runs() == ((0, 1, ((0, 10_000),)),)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (Missing(3, (), 0), "step 3: all slices"),
        (Missing(3, ((0, 1), (4, 7)), 8), "step 3: slices 0, 4 to 6 of 8"),
    ],
)
def test_what_is_missing_in_words(missing: Missing, text: str) -> None:
    assert str(missing) == text


def test_names_in_words() -> None:
    assert str(SyncName(4, 2, 3, 8)) == "step 4, slice 2"
    assert str(SyncName(4, 2, 4, 8)) == "step 4, slices 2 to 3"
    assert str(AsyncName(1, 9)) == "epoch 1, slice 9"
    assert (SyncName(4, 2, 4, 8).slices, AsyncName(1, 9).slices) == (2, 1)
