"""Making a version safe, also if that takes several attempts."""

from __future__ import annotations

import random

from paramserver.core.procedures.securing import (
    Await,
    Command,
    Copied,
    Cut,
    Done,
    End,
    Event,
    Later,
    Look,
    Miss,
    Securing,
    Settled,
    Stands,
)

ROOM = Stands(safe=False, room=True)


def commands(*events: Event, version: int = 9) -> list[Command]:
    securing = Securing(version, 0.02)
    return [securing.command, *(securing.handle(event) for event in events)]


def test_a_version_that_is_safe_needs_nothing() -> None:
    assert commands(Stands(safe=True, room=False)) == [Look(), End()]


def test_the_version_is_copied_and_saved() -> None:
    assert commands(ROOM, Copied(9), Settled(True)) == [Look(), Cut(), Await(9), End()]
    assert commands(ROOM, Copied(12), Settled(True)) == [Look(), Cut(), Await(12), End()]


def test_a_server_without_room_is_waited_for() -> None:
    assert commands(Stands(False, False), ROOM) == [Look(), Look(0.02), Cut()]


def test_a_failure_that_passes() -> None:
    found = commands(Later(), ROOM, Later(), ROOM, Copied(9), Later(), ROOM, Copied(9), Settled(False, again=True))
    later = Look(0.2)
    assert found == [Look(), later, Cut(), later, Cut(), Await(9), later, Cut(), Await(9), Look(0.02)]


def test_a_version_that_cannot_be_saved() -> None:
    assert commands(ROOM, Copied(9), Settled(False), Done()) == [Look(), Cut(), Await(9), Miss(9), End()]


def test_a_checkpoint_of_an_earlier_version_is_not_enough() -> None:
    assert commands(ROOM, Copied(8), Settled(True))[-1] == Look(0.02)
    assert commands(ROOM, Copied(8), Settled(False))[-1] == Look(0.02)


def test_random_schedules() -> None:
    """It ends only with a checkpoint of the version or a later one, or after it has said that there is none."""
    for seed in range(500):
        chance = random.Random(seed)
        securing, newest, saved, missed, reached = Securing(9, 0.02), 5, -1, False, -1
        for _ in range(500):
            command: Command = securing.command
            event: Event = Done()
            if isinstance(command, End):
                break
            newest += chance.random() < 0.1
            match command:
                case Look():
                    event = Stands(saved >= 9, chance.random() < 0.8)
                case Cut():
                    reached = newest
                    event = Copied(newest)
                case Await(version):
                    assert version == reached
                    good = chance.random() < 0.4
                    saved = max(saved, version) if good else saved
                    event = Settled(good, chance.random() < 0.9)
                case Miss(version):
                    missed = True
                    assert version >= 9
            securing.handle(Later() if chance.random() < 0.2 and not missed else event)
        assert isinstance(securing.command, End)
        assert missed or saved >= 9, f"seed {seed}"
