"""Going back to a checkpoint: which command follows which, whatever fails and whoever dies meanwhile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from paramserver.core.procedures.rollback import (
    Ask,
    AwaitServers,
    BeginTimeline,
    Command,
    Done,
    EndOld,
    Event,
    Failed,
    GiveUp,
    GoOn,
    Kind,
    Reason,
    Restore,
    Resumes,
    Rollback,
    Saved,
    SetUp,
    StepDown,
    Told,
)

OLD, NEW = Saved("a", 10, 3), Saved("b", 20, 4)
TOLD = Told(25, (5, 6), published=True, saved=(NEW, OLD), place="/ckpt")
BACK: tuple[Command, ...] = (EndOld(), AwaitServers(), Ask())
LATER = Failed(Kind.LATER, "no answer")


def commands(rollback: Rollback, *events: Event, seconds: float = 0.0) -> list[Command | None]:
    """The commands that follow the events, which come ``seconds`` apart."""
    return [rollback.handle(event, seconds * number) for number, event in enumerate(events)]


def asked(event: Event | None = None) -> Rollback:
    """On the way back, and waiting for the answers of the shards."""
    rollback = Rollback(60.0)
    assert commands(rollback, event or Reason(22), Done(), Done()) == list(BACK)
    return rollback


def test_back_to_the_newest_checkpoint() -> None:
    rollback = asked()
    assert commands(rollback, TOLD, Done(), Done()) == [BeginTimeline((5, 6, 4), 20), Restore(NEW), GoOn(20, 5)]
    assert (rollback.count, rollback.steps_redone, rollback.reached) == (1, 5, 25)
    assert rollback.under_way
    assert commands(rollback, Done()) == [None]
    assert not rollback.under_way


def test_steps_that_servers_reported_before_they_died_count_as_done_again() -> None:
    rollback = asked(Reason(31))
    assert commands(rollback, TOLD, Done(), Done())[-1] == GoOn(20, 11)


def test_version_0_is_uploaded_again_if_it_was_not_published() -> None:
    rollback = asked(Reason(0))
    told = Told(0, (0,), published=False)
    assert commands(rollback, told, Done(), Done()) == [BeginTimeline((0, 0), 0), SetUp(), GoOn(-1, 0)]
    assert rollback.count == 1


def test_a_new_job_goes_on_from_a_checkpoint() -> None:
    rollback = asked(Resumes())
    assert rollback.resuming
    told = Told(0, (0, 0), published=False, saved=(Saved("b", 20, 4, elsewhere=True),), place="/new")
    last = commands(rollback, told, Done(), Done())[-1]
    assert last == GoOn(20, None)
    assert (rollback.resuming, rollback.count, rollback.steps_redone) == (False, 0, 0)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (Told(9, (1,), published=True), "a shard of the model is gone, and there is no checkpoint"),
        (Told(9, (1,), published=True, place="/ckpt"), "there is no complete checkpoint of this job in /ckpt"),
    ],
)
def test_there_is_nothing_to_go_back_to(told: Told, reason: str) -> None:
    rollback = asked()
    assert commands(rollback, told) == [GiveUp(reason)]
    assert rollback.under_way, "nothing else begins in a job that fails"


def test_a_damaged_checkpoint_is_never_chosen_again() -> None:
    rollback = asked()
    damaged = Failed(Kind.DAMAGED, "a checksum differs")
    assert commands(rollback, TOLD, Done(), damaged) == [BeginTimeline((5, 6, 4), 20), Restore(NEW), AwaitServers()]
    again = commands(rollback, Done(), TOLD, Done(), damaged, Done(), TOLD)
    assert again == [
        Ask(),
        BeginTimeline((5, 6, 3), 10),
        Restore(OLD),
        AwaitServers(),
        Ask(),
        GiveUp("there is no complete checkpoint of this job in /ckpt"),
    ]


def test_a_place_that_cannot_be_read_is_asked_again_until_patience_ends() -> None:
    rollback = asked()
    unreadable = Failed(Kind.DAMAGED, "no permission")
    found = commands(rollback, unreadable, Done(), unreadable, Done(), unreadable, seconds=20.0)
    assert found[:4] == [AwaitServers(after_failure=True), Ask()] * 2
    gave_up = "it was tried for 60 s (cluster.max_idle_s), the last time with: no permission"
    assert found[4] == GiveUp(gave_up)


@pytest.mark.parametrize(
    ("kind", "follows"),
    [
        (Kind.LATER, AwaitServers(after_failure=True)),
        (Kind.STRAYED, AwaitServers(after_failure=True)),
        (Kind.REPLACED, StepDown("why")),
        (Kind.FOR_GOOD, GiveUp("why")),
    ],
)
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_command_fails(done: int, kind: Kind, follows: Command) -> None:
    rollback = asked()
    events: list[Event] = [TOLD, Done()]
    for event in events[:done]:
        rollback.handle(event, 0.0)
    assert rollback.handle(Failed(kind, "why"), 1.0) == follows


@pytest.mark.parametrize("after", [1, 2])
def test_a_shard_that_dies_during_an_attempt_makes_another_attempt(after: int) -> None:
    """On a timeline of its own."""
    rollback = asked()
    events: list[Event] = [TOLD, Done()]
    for event in events[:after]:
        rollback.handle(event, 0.0)
    assert rollback.handle(Reason(99), 0.0) is None
    rest = commands(rollback, *[Done()] * (2 - after), Done(), Done(), TOLD, Done(), Done())
    assert rest[-5:] == [AwaitServers(), Ask(), BeginTimeline((5, 6, 4), 20), Restore(NEW), GoOn(20, 5)]
    assert rollback.count == 1


def test_a_shard_that_dies_while_workers_follow_takes_the_job_back_once_more() -> None:
    rollback = asked()
    commands(rollback, TOLD, Done(), Done())
    assert rollback.handle(Reason(99), 0.0) is None
    assert rollback.handle(Done(), 0.0) == EndOld(again=True)
    rest = commands(rollback, Done(), Done(), TOLD, Done(), Done(), Done())
    assert rest[-2:] == [GoOn(20, 5), None]
    assert (rollback.count, rollback.steps_redone) == (2, 10)


def walk(seed: int) -> list[Command]:
    """One job that goes back while everything fails now and then; the commands, which follow the rules below."""
    chance = random.Random(seed)
    rollback = Rollback(1000.0)
    saved = tuple(Saved(str(number), number, number) for number in range(chance.randint(1, 5), 0, -1))
    published = chance.random() < 0.8
    command = rollback.handle(Reason(chance.randint(0, 9)), 0.0)
    performed: list[Command] = []
    damaged: set[str] = set()
    gone_since_asked = False
    for now in range(400):
        if command is None or isinstance(command, (GiveUp, StepDown)):
            break
        performed.append(command)
        if isinstance(command, Ask):
            gone_since_asked = False
        if isinstance(command, Restore):
            assert command.saved.name not in damaged
        if isinstance(command, GoOn):
            assert not gone_since_asked, "a shard is gone, and workers are told to go on"
        if chance.random() < 0.1:
            assert rollback.handle(Reason(5), now) is None, "one command at a time"
            gone_since_asked = not isinstance(command, (AwaitServers, EndOld, GoOn))
        event: Event = (
            Told(chance.randint(0, 9), (1, 2), published, saved, "/x") if isinstance(command, Ask) else Done()
        )
        if isinstance(command, (Ask, BeginTimeline, Restore, SetUp)) and chance.random() < 0.2:
            event = Failed(chance.choice([Kind.LATER, Kind.STRAYED, Kind.DAMAGED]), "a failure")
            if isinstance(command, Restore) and event.kind is Kind.DAMAGED:
                damaged.add(command.saved.name)
        command = rollback.handle(event, now)
    assert command is None or isinstance(command, GiveUp), "it comes to an end"
    went = [one for one in performed if isinstance(one, GoOn)]
    assert (rollback.count, rollback.steps_redone) == (len(went), sum(one.redone or 0 for one in went))
    return performed


FOLLOW: dict[type[Command], Sequence[type[Command]]] = {
    EndOld: (AwaitServers,),
    AwaitServers: (Ask,),
    Ask: (BeginTimeline, AwaitServers),
    BeginTimeline: (Restore, SetUp, AwaitServers),
    Restore: (GoOn, AwaitServers),
    SetUp: (GoOn, AwaitServers),
    GoOn: (EndOld,),
}


def test_the_order_of_commands_in_random_schedules() -> None:
    seen = set()
    for seed in range(1000):
        performed = walk(seed)
        for one, following in itertools.pairwise(performed):
            assert type(following) in FOLLOW[type(one)], f"{following} after {one}, seed {seed}"
            seen.add((type(one), type(following)))
    assert seen == {(one, following) for one, others in FOLLOW.items() for following in others}
