"""How long a worker waits before it asks for work, and when it asks before it begins a slice of its own."""

from __future__ import annotations

from paramserver.core.tempo import Tempo


def worked(*seconds: float) -> Tempo:
    """A worker that has computed slices of these lengths in its first step, which began at 0."""
    tempo = Tempo()
    tempo.step(0.0, False)
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
    tempo.step(100.0, False)
    assert tempo.patience_s() == 2.0
    tempo.answered(True)
    assert tempo.patience_s() == 0.0, "there may be more"
    tempo.answered(False)
    assert tempo.patience_s() == 4.0
    tempo.step(200.0, False)
    assert tempo.patience_s() == 1.0


def test_a_worker_whose_slices_were_taken_is_careful_for_a_while() -> None:
    tempo = worked(1.0)
    assert not tempo.careful(1.0, first=True)
    tempo.step(5.0, True)
    for step in range(16):
        tempo.begun(6.0 + step)
        assert tempo.careful(6.0 + step, first=True)
        tempo.step(6.0 + step, False)
    assert not tempo.careful(30.0, first=True)


def test_a_step_that_takes_unusually_long_makes_careful_but_for_its_first_slice() -> None:
    tempo = worked(1.0)
    tempo.step(4.0, False)  # the steps take 4 s
    assert not tempo.careful(9.0, first=False)
    assert tempo.careful(10.1, first=False)
    assert not tempo.careful(10.1, first=True)


def test_who_was_always_too_slow_tries_again_after_some_steps() -> None:
    tempo = worked(10.0)
    asked = []
    for step in range(1, 13):
        tempo.step(10.0 + step, True)
        asked.append(tempo.careful(10.0 + step, first=True))
    assert asked == [True] * 8 + [False] * 4
    assert tempo.work_s == 0.0, "what it was is forgotten"
    tempo.begun(30.0)
    tempo.finished(31.0)
    tempo.step(32.0, True)
    assert tempo.careful(32.0, first=True)
    assert tempo.work_s == 1.0
