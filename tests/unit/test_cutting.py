"""Having all shards copy one version: which command follows which, whatever fails or is cancelled."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest

from paramserver import errors
from paramserver.core.procedures.cutting import (
    Answered,
    Ask,
    Command,
    Compare,
    Compared,
    Copy,
    Cutting,
    Done,
    End,
    Event,
    Failed,
    GiveUp,
    Hold,
    LetGo,
    TakeBack,
    Told,
)

LOST = errors.UnavailableError("no answer")


def commands(cutting: Cutting, *events: Event, seconds: float = 0.0) -> list[Command]:
    """The first command, and those that follow the events, which come ``seconds`` apart."""
    return [cutting.command, *(cutting.handle(event, seconds * number) for number, event in enumerate(events))]


def ahead(multiple: int = 1) -> Cutting:
    return Cutting(True, False, 0.0, 120.0, multiple)


def even(hold: bool = False) -> Cutting:
    return Cutting(False, hold, 0.0, 20.0)


def test_a_version_that_no_shard_has_made_is_named() -> None:
    told = Told([7, 9])
    assert commands(ahead(), told, Answered(2, 0)) == [Ask(), Copy(10), End(10)]
    assert commands(ahead(4), told, Answered(2, 0)) == [Ask(), Copy(12), End(12)]


def test_shards_that_are_faster_get_a_version_further_ahead() -> None:
    found = commands(ahead(), Told([9]), Answered(1, 1), Done(), Told([12]), Answered(0, 2), Done(), Told([20]))
    assert found == [Ask(), Copy(10), TakeBack(10), Ask(), Copy(16), TakeBack(16), Ask(), Copy(36)]


def test_a_shard_that_does_not_answer_may_copy_the_version() -> None:
    cutting = ahead()
    assert commands(cutting, Told([9]), Failed(LOST), Done()) == [Ask(), Copy(10), TakeBack(10), GiveUp(LOST)]
    assert cutting.over


def test_shards_that_are_always_faster() -> None:
    found = commands(ahead(), Told([9]), Answered(1, 1), Done(), seconds=121.0)
    assert found[:3] == [Ask(), Copy(10), TakeBack(10)]
    assert isinstance(found[3], GiveUp)
    assert str(found[3].error) == "no version could be named in advance within 120 s"


def test_shards_at_rest_copy_the_version_at_which_they_stand() -> None:
    told = Told([9, 9], even=True)
    assert commands(even(), told, Compared(True), Answered(2, 0)) == [Ask(), Compare(), Copy(9), End(9)]
    assert commands(even(), Told([9, 9], even=True, saved=True)) == [Ask(), End(9)]


def test_shards_that_stand_at_different_versions_are_asked_again() -> None:
    found = commands(even(), Told([9, 8]), Told([9, 9], even=True), Compared(True), Answered(1, 1), Done())
    assert found == [Ask(), Ask(again=True), Compare(), Copy(9), TakeBack(9), Ask(again=True)]


def test_workers_are_held_back_until_shards_stand_still_with_the_same_slices() -> None:
    cutting = even(hold=True)
    nine, ten = Told([9, 9], even=True), Told([10, 10], even=True)
    found = commands(cutting, Done(), nine, ten, ten, Compared(False), ten, Compared(True), Answered(2, 0), Done())
    again = Ask(again=True)
    assert found == [Hold(), Ask(), again, again, Compare(), again, Compare(), Copy(10), LetGo(), End(10)]


@pytest.mark.parametrize("after", range(5))
def test_workers_go_on_whatever_fails(after: int) -> None:
    nine = Told([9, 9], even=True)
    cutting = even(hold=True)
    events: list[Event] = [Done(), nine, nine, Compared(True)]
    commands(cutting, *events[:after])
    rest = [cutting.handle(Failed(LOST), 1.0)]
    if rest == [TakeBack(9)]:
        rest.append(cutting.handle(Done(), 1.0))
    assert rest[-1] == LetGo()
    assert cutting.handle(Done(), 1.0) == GiveUp(LOST)


def test_workers_are_not_held_for_ever() -> None:
    found = commands(even(hold=True), Done(), Told([8, 9]), Told([9, 10]), Done(), seconds=12.0)
    assert found[:4] == [Hold(), Ask(), Ask(again=True), LetGo()]
    assert isinstance(found[4], GiveUp)
    assert str(found[4].error) == "the shards did not come to stand at one version within 20 s"


def test_a_caller_that_goes_away_while_workers_are_let_go_hears_of_it() -> None:
    cutting, gone = even(hold=True), asyncio.CancelledError()
    nine = Told([9, 9], even=True)
    commands(cutting, Done(), nine, nine, Compared(True), Answered(2, 0))
    assert cutting.handle(Failed(gone), 0.0) == GiveUp(gone)
    other = ahead()
    commands(other, Told([9]), Answered(1, 1))
    assert other.handle(Failed(gone), 0.0) == GiveUp(gone)


FOLLOW: dict[type[Command], Sequence[type[Command]]] = {
    Hold: (Ask, LetGo),
    Ask: (Ask, Compare, Copy, End, LetGo, GiveUp),
    Compare: (Ask, Copy, LetGo, GiveUp),
    Copy: (End, TakeBack, LetGo, Ask, GiveUp),
    TakeBack: (Ask, LetGo, GiveUp),
    LetGo: (End, GiveUp),
}


def walk(seed: int) -> list[Command]:
    chance = random.Random(seed)
    kind = chance.choice(["ahead", "even", "hold"])
    cutting = Cutting(kind == "ahead", kind == "hold", 0.0, chance.choice([5.0, 50.0]), chance.choice([1, 3]))
    performed: list[Command] = []
    versions = [chance.randrange(9)] * 2
    taken: set[int] = set()
    held = False
    for now in range(400):
        command = cutting.command
        performed.append(command)
        if cutting.over:
            break
        event: Event = Done()
        match command:
            case Hold():
                held = True
            case LetGo():
                held = False
            case Ask():
                versions = [version + chance.choice([0, 0, 0, 1]) for version in versions]
                event = Told(versions, versions[0] == versions[1], chance.random() < 0.05)
            case Compare():
                event = Compared(chance.random() < 0.7)
            case Copy(version):
                assert kind != "ahead" or version > max(versions)
                copied = chance.choice([0, 1, 2])
                taken |= {version} if copied else set()
                event = Answered(copied, 2 - copied)
            case TakeBack(version):
                taken.discard(version)
        if chance.random() < 0.08 and not isinstance(command, (LetGo, TakeBack)):
            event = Failed(LOST)  # it may have been done nevertheless
        cutting.handle(event, now)
    last = performed[-1]
    assert isinstance(last, (End, GiveUp)), "it comes to an end"
    assert not held, "workers wait for ever"
    if isinstance(last, GiveUp):
        assert not taken, "a shard keeps a copy that others lack"
    else:
        assert taken <= {last.version}
    return performed


def test_random_schedules() -> None:
    seen = set()
    for seed in range(2000):
        for one, following in itertools.pairwise(walk(seed)):
            assert type(following) in FOLLOW[type(one)], f"{following} after {one}, seed {seed}"
            seen.add((type(one), type(following)))
    assert seen == {(one, following) for one, others in FOLLOW.items() for following in others}
