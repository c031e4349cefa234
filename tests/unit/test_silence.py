"""How long processes have not been heard of."""

from __future__ import annotations

from paramserver.processes.silence import Silence


def test_silence_adds_up_until_something_is_heard() -> None:
    silence = Silence()
    silence.look(0.0, [1, 2], [])
    for quarter in range(1, 9):
        silence.look(quarter / 4, [1], [2])
    assert (silence.of(1), silence.of(2)) == (0.0, 2.0)
    silence.look(2.25, [1, 2], [])
    assert silence.of(2) == 0.0


def test_who_was_never_heard_of_is_only_starting() -> None:
    silence = Silence()
    for second in range(100):
        silence.look(float(second), [], [7])
    assert silence.of(7) == 0.0


def test_a_pause_of_ones_own_is_nobodys_silence() -> None:
    silence = Silence()
    silence.look(0.0, [1], [])
    silence.look(0.25, [], [1])
    silence.look(3600.0, [], [1])
    assert silence.of(1) == 1.25


def test_who_is_forgotten_begins_anew() -> None:
    silence = Silence()
    silence.look(0.0, [1], [])
    silence.look(1.0, [], [1])
    silence.forget(1)
    silence.look(2.0, [], [1])
    assert silence.of(1) == 0.0
