"""How long a worker waits before it asks for work, and when it asks before it begins a slice of its own."""

from __future__ import annotations

from paramserver.core.work.speed import Speed


def worked(*seconds: float) -> Speed:
    """A worker that has computed slices of these lengths in its first step, which began at 0."""
    speed = Speed()
    speed.step(0.0)
    now = 0.0
    for length in seconds:
        speed.begun(now)
        now += length
        speed.finished(now)
    return speed


def test_one_long_slice_does_not_count_for_much() -> None:
    speed = worked(1.0, 1.0, 50.0, 1.0)
    assert speed.work_s == 1.0
    speed.pushed(0.5)
    assert speed.work_s == 1.5


def test_patience_is_a_part_of_a_slice_and_never_nothing() -> None:
    assert worked(4.0).patience_s() == 1.0
    assert worked(0.0001).patience_s() == 0.01
    assert Speed().patience_s() == 0.5


def test_who_asks_in_vain_asks_less_often_and_less_in_the_next_steps() -> None:
    speed = worked(4.0)
    waits = []
    for _ in range(5):
        waits.append(speed.patience_s())
        speed.answered(False)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    speed.step(100.0)
    assert speed.patience_s() == 2.0
    speed.answered(True)
    assert speed.patience_s() == 0.0, "there may be more"
    speed.answered(False)
    assert speed.patience_s() == 4.0
    speed.step(200.0)
    assert speed.patience_s() == 1.0


def slow_at(*lost: int) -> list[bool]:
    """Whether a worker is slow in each of its steps, if it has lost so many slices in the one before."""
    speed, found = worked(1.0), []
    for number, count in enumerate(lost):
        speed.step(5.0 * (number + 1), count)
        found.append(speed.slow)
    return found


def test_only_who_is_helped_again_and_again_or_much_is_slow() -> None:
    assert slow_at(1, 0, 0, 0, 1) == [False] * 5
    assert slow_at(1, 0, 1, 0, 0, 0) == [False, False, True, True, False, False]
    assert slow_at(3, 0, 0, 0, 0) == [True, True, True, True, False]


def test_a_slow_worker_asks_in_the_second_half_of_a_step_only_and_never_before_its_first_slice() -> None:
    speed = worked(1.0)
    speed.step(4.0, 1)
    speed.step(8.0, 1)  # the steps take 4 s
    assert not speed.asks(9.9, first=False)
    assert speed.asks(10.1, first=False)
    assert not speed.asks(10.1, first=True)


def test_in_a_step_that_takes_unusually_long_everybody_asks() -> None:
    speed = worked(1.0)
    speed.step(4.0)  # the steps take 4 s
    assert not speed.asks(9.9, first=False)
    assert speed.asks(10.1, first=False)
    assert not speed.asks(10.1, first=True)
