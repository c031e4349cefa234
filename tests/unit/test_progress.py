"""Who is stalled: lives, and gets nowhere."""

from __future__ import annotations

import pytest

from paramserver.core.job.progress import Progress


def at_work(progress: Progress, now: float, slices: dict[int, int], slice_s: float = 0.1) -> None:
    for worker, count in slices.items():
        progress.hear(worker, count, True, slice_s, now)


def test_who_computes_no_slice_for_too_long_is_stalled_until_it_does() -> None:
    progress = Progress(8.0)
    at_work(progress, 0.0, {1: 3, 2: 3})
    at_work(progress, 7.0, {1: 3, 2: 90})
    assert progress.look(7.9) == frozenset()
    assert progress.look(8.1) == {1}
    assert progress.look(8.3) == frozenset(), "that was said"
    assert progress.stalled == {1}
    at_work(progress, 9.0, {1: 3, 2: 99})
    assert progress.stalled == {1}
    at_work(progress, 10.0, {1: 4})
    assert progress.stalled == frozenset()
    assert progress.look(14.0) == frozenset()


def test_who_waits_for_others_is_not_stalled() -> None:
    progress = Progress(8.0)
    for now in range(0, 100, 5):
        progress.hear(1, 3, False, 0.1, float(now))
        progress.hear(2, now, True, 0.1, float(now))
        assert progress.look(now + 1.0) == frozenset()


def test_a_stalled_worker_that_asks_for_work_is_not_stalled_any_more() -> None:
    progress = Progress(8.0)
    at_work(progress, 0.0, {1: 3})
    at_work(progress, 8.0, {2: 9})
    assert progress.look(9.0) == {1}
    progress.hear(1, 3, False, 0.1, 9.5)
    assert progress.stalled == frozenset()


def test_if_all_are_stalled_nobody_is() -> None:
    progress = Progress(8.0)
    at_work(progress, 0.0, {1: 3, 2: 4})
    assert progress.look(20.0) == frozenset()
    assert progress.stalled == frozenset()
    at_work(progress, 21.0, {1: 4})
    assert progress.look(21.5) == {2}
    assert progress.look(40.0) == frozenset()
    assert progress.stalled == frozenset(), "the other one does not get on either"


def test_slices_may_take_four_times_as_long_as_usual() -> None:
    progress = Progress(8.0)
    at_work(progress, 0.0, {1: 3, 2: 3, 3: 3}, slice_s=10.0)
    at_work(progress, 30.0, {2: 6, 3: 6}, slice_s=10.0)
    assert progress.limit_s == 40.0
    assert progress.look(39.0) == frozenset()
    assert progress.look(41.0) == {1}


def test_the_lost_are_forgotten() -> None:
    progress = Progress(8.0)
    at_work(progress, 0.0, {1: 3, 2: 3})
    at_work(progress, 8.0, {2: 4})
    assert progress.look(9.0) == {1}
    progress.gone(1)
    assert progress.stalled == frozenset()
    assert progress.look(30.0) == frozenset(), "there is only one left"


@pytest.mark.parametrize("now", [9.0, 1e9])
def test_zero_means_never(now: float) -> None:
    progress = Progress(0.0)
    at_work(progress, 0.0, {1: 3})
    at_work(progress, 8.0, {2: 4})
    assert progress.look(now) == frozenset()
