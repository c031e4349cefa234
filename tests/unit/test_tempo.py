"""How long a worker waits before it asks for work, and when it asks before it begins a slice of its own."""

from __future__ import annotations

from paramserver.core.work.tempo import Tempo


def worked(*seconds: float) -> Tempo:
    """A worker that has computed slices of these lengths in its first step, which began at 0."""
    tempo = Tempo()
    tempo.step(0.0)
    now = 0.0
    for length in seconds:
        tempo.begun(now)
        now += length
        tempo.finished(now)
    return tempo


def test_one_long_slice_does_not_count_for_much() -> None:
    tempo = worked(1.0, 1.0, 50.0, 1.0)
    assert tempo.work_s == 1.0
    tempo.pushed(0.5)
    assert tempo.work_s == 1.5


def test_patience_is_a_part_of_a_slice_and_never_nothing() -> None:
    assert worked(4.0).patience_s() == 1.0
    assert worked(0.0001).patience_s() == 0.01
    assert Tempo().patience_s() == 0.5


def test_who_asks_in_vain_asks_less_often_and_less_in_the_next_steps() -> None:
    tempo = worked(4.0)
    waits = []
    for _ in range(5):
        waits.append(tempo.patience_s())
        tempo.answered(False)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    tempo.step(100.0)
    assert tempo.patience_s() == 2.0
    tempo.answered(True)
    assert tempo.patience_s() == 0.0, "there may be more"
    tempo.answered(False)
    assert tempo.patience_s() == 4.0
    tempo.step(200.0)
    assert tempo.patience_s() == 1.0


def slow_at(*lost: int) -> list[bool]:
    """Whether a worker is slow in each of its steps, if it has lost so many slices in the one before."""
    tempo, found = worked(1.0), []
    for number, count in enumerate(lost):
        tempo.step(5.0 * (number + 1), count)
        found.append(tempo.slow)
    return found


def test_only_who_is_helped_again_and_again_or_much_is_slow() -> None:
    assert slow_at(1, 0, 0, 0, 1) == [False] * 5
    assert slow_at(1, 0, 1, 0, 0, 0) == [False, False, True, True, False, False]
    assert slow_at(3, 0, 0, 0, 0) == [True, True, True, True, False]


def test_a_slow_worker_asks_in_the_second_half_of_a_step_only_and_never_before_its_first_slice() -> None:
    tempo = worked(1.0)
    tempo.step(4.0, 1)
    tempo.step(8.0, 1)  # the steps take 4 s
    assert not tempo.asks(9.9, first=False)
    assert tempo.asks(10.1, first=False)
    assert not tempo.asks(10.1, first=True)


def test_in_a_step_that_takes_unusually_long_everybody_asks() -> None:
    tempo = worked(1.0)
    tempo.step(4.0)  # the steps take 4 s
    assert not tempo.asks(9.9, first=False)
    assert tempo.asks(10.1, first=False)
    assert not tempo.asks(10.1, first=True)
