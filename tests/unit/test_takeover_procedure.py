"""Taking a job over: whose answers count, and which command follows, whoever is dead and whatever is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paramserver.core.job.held import Backup, Held
from paramserver.core.job.holders import CaughtUp, Holders, ServerGone, ServersThere
from paramserver.core.job.membership import Member, Role
from paramserver.core.procedures.takeover import (
    Ask,
    Command,
    Done,
    Event,
    Fail,
    GoBack,
    GoOn,
    Later,
    LookForCheckpoints,
    NotHeard,
    Number,
    Obey,
    Promote,
    Publish,
    Record,
    Report,
    StepDown,
    Takeover,
    Told,
)

RECORD = Record(model=True, described=True, ready=True, timeline=2, placement=0, servers=2, checkpoints=False)
DONE = Done()


def member(index: int) -> Member:
    name = f"server-{index}"
    return Member(10 + index, Role.SERVER, index, name, 0.0, address=f"{name}:1", incarnation=100 + index)


A, B = SERVERS = member(0), member(1)


def placed(replicas: int = 0, servers: int = 2) -> Holders:
    """Each shard with all of its backups."""
    holders = Holders.plan(servers, replicas)
    holders.handle(ServersThere(range(servers)))
    for shard, server in holders.catching_up(range(servers)):
        backup = holders.shards[shard].backup(server)
        assert backup is not None
        holders.handle(CaughtUp(shard, server, backup.since))
    return holders


def report(server: Member, shard: int, **changed: Any) -> Report:
    made = Report(shard, server.incarnation, True, False, True, 2, 0, generation=7, term=3)
    return replace(made, **changed)


def answers(*reports: tuple[Member, Report], newcomers: int = 0) -> Told:
    told: dict[int, list[Report]] = {}
    for server, one in reports:
        told.setdefault(server.ident, []).append(one)
    return Told(told, newcomers)


def taking(record: Record = RECORD, holders: Holders | None = None, known_term: int = 0) -> Takeover:
    return Takeover(record, holders or placed(), SERVERS, 4, known_term, 0.0, 60.0)


def commands(core: Takeover, *events: Event, seconds: float = 0.0) -> list[Command]:
    return [core.command, *(core.handle(event, seconds * number) for number, event in enumerate(events, 1))]


BOTH = answers((A, report(A, 0)), (B, report(B, 1)))
ASK = Ask((A, B))


def test_all_servers_answer() -> None:
    found = commands(taking(), BOTH, DONE, DONE, DONE, DONE, BOTH, DONE)
    promote = Promote((), published=True)
    assert found == [ASK, Number(7, 3), promote, Obey(), Publish(), ASK, LookForCheckpoints(), GoOn(published=True)]


def test_what_servers_said_before_they_obeyed_does_not_stand() -> None:
    """A command of the earlier coordinator may come in between."""
    core = taking()
    commands(core, BOTH, DONE, DONE, DONE, DONE)
    assert core.sources() == {}
    assert core.handle(answers((A, report(A, 0)), (B, report(B, 1, timeline=3, active=False))), 1.0) == Fail(
        "server-1 at server-1:1 has begun anew: its shard of the model is gone, and the job cannot be taken over"
    )


def test_a_server_that_is_silent_is_asked_again_until_patience_ends() -> None:
    core = taking()
    one = answers((A, report(A, 0)))
    again = Ask((B,), 0.5)
    found = commands(core, one, Told({}), Told({}), seconds=20.0)
    late = Later("the job cannot be taken over: no answer within 60 s from server-1 at server-1:1", late=True)
    assert found == [ASK, again, again, late]


def test_version_0_may_be_published_on_some_servers_only() -> None:
    new = replace(RECORD, ready=False)
    some = answers((A, report(A, 0)), (B, report(B, 1, active=False)))
    assert commands(taking(new), some, DONE)[-1] == Promote((), published=True)
    none = answers((A, report(A, 0, active=False)), (B, report(B, 1, active=False)))
    found = commands(taking(new), none, DONE, DONE, DONE, none, DONE)
    assert found[2:] == [Promote((), published=False), Obey(), ASK, LookForCheckpoints(), GoOn(published=False)]


def test_a_job_without_a_model_just_goes_on() -> None:
    assert taking(replace(RECORD, model=False, described=False)).command == GoOn(published=False)
    assert isinstance(taking(replace(RECORD, described=False)).command, Fail)


def test_a_term_that_the_store_has_forgotten() -> None:
    higher = answers((A, report(A, 0, term=4)), (B, report(B, 1)))
    assert commands(taking(), higher)[-1] == StepDown("the store has forgotten term 4, which a server has heard of", 4)
    assert isinstance(commands(taking(known_term=4), higher)[-1], Number)


def test_backups_take_the_place_of_a_server_that_does_not_answer() -> None:
    core = taking(holders=placed(1))
    mine = answers((A, report(A, 0)), (A, report(A, 1, backup=True)))
    assert core.handle(mine, 0.1) == Ask((B,), 0.2), "it may be slow"
    assert core.handle(Told({}), 0.3) == Number(7, 3)
    assert core.handle(DONE, 0.3) == Promote((B,), published=True)
    commands(core, DONE, DONE)
    assert core.handle(DONE, 0.4) == Ask((A,)), "nobody asks the server that is gone"


def test_without_backups_a_silent_server_is_waited_for_until_another_one_comes() -> None:
    safe = replace(RECORD, checkpoints=True)
    core = taking(safe)
    one = answers((A, report(A, 0)))
    found = commands(core, one, replace(one, newcomers=1), DONE)
    assert found[2:] == [Number(7, 3), GoBack((B,))]
    assert commands(taking(), one, replace(one, newcomers=1))[-1] == Ask((B,), 0.5), "there is nothing to go back to"
    assert commands(taking(), one, replace(one, newcomers=2))[-1] == Fail(
        "all servers have begun anew: the model is gone"
    )


def test_a_server_on_another_timeline_goes_back_with_the_others() -> None:
    strayed = answers((A, report(A, 0)), (B, report(B, 1, timeline=1)))
    assert commands(taking(replace(RECORD, checkpoints=True)), strayed, DONE)[-1] == GoBack(())


def test_another_process_at_the_address_is_no_member() -> None:
    core = taking(replace(RECORD, checkpoints=True))
    assert commands(core, answers((A, report(A, 0)), (B, report(B, 1, incarnation=5))))[-1] == Ask((B,), 0.5)


@pytest.mark.parametrize(("what", "checkpoints"), [("loading", True), ("recovering", True), ("recovering", False)])
def test_in_the_middle_of_a_load_or_of_going_back(what: str, checkpoints: bool) -> None:
    core = taking(replace(RECORD, checkpoints=checkpoints, **{what: True}))
    follows = GoBack(()) if checkpoints else Promote((), published=True)
    assert commands(core, BOTH, DONE)[-1] == follows


def test_in_the_middle_of_a_load_without_checkpoints() -> None:
    assert isinstance(commands(taking(replace(RECORD, loading=True)), BOTH, DONE)[-1], Fail)


def promoted() -> Holders:
    """The record after the death of server-1: server-0 is to be the primary of both shards."""
    holders = placed(1)
    holders.handle(ServerGone(1, [0]))
    return holders


def test_a_backup_that_has_not_heard_that_it_is_the_primary() -> None:
    """The earlier coordinator died between writing that down and telling the server."""
    core = Takeover(RECORD, promoted(), [A], 4, 0, 0.0, 60.0)
    unheard = answers((A, report(A, 0)), (A, report(A, 1, backup=True)))
    found = commands(core, unheard, DONE, DONE, DONE, DONE)
    assert found[1:] == [Number(7, 3), Promote((), published=True), Obey(), Publish(), Ask((A,))]
    assert core.handle(unheard, 1.0) == Ask((A,), 0.2), "it makes the versions that its primary had decided"
    heard = answers((A, report(A, 0)), (A, report(A, 1, placement=9)))
    assert core.handle(heard, 1.2) == LookForCheckpoints()
    assert core.sources() == {0: A.ident, 1: A.ident}


def test_a_backup_on_another_timeline_cannot_be_the_primary() -> None:
    holders = Holders([1], 1)
    holders.restore(5, 1, [Held(0)])
    core = Takeover(replace(RECORD, checkpoints=True), holders, [A], 4, 0, 0.0, 60.0)
    assert commands(core, answers((A, report(A, 0, backup=True, timeline=1))), DONE)[-1] == GoBack(())


def test_a_primary_that_has_not_heard_that_its_shard_moves() -> None:
    """Both servers are members: the record is newer than what they say."""
    holders = Holders([0, 1], 1)
    holders.restore(5, 1, [Held(0), Held(0, (Backup(1, 5, whole=True),))])
    core = taking(replace(RECORD, placement=5), holders)
    told = answers((A, report(A, 0)), (A, report(A, 1, backup=True)), (B, report(B, 1)))
    assert isinstance(commands(core, told)[-1], Number)
    assert holders.primaries == (0, 0)
    assert core.sources() == {0: A.ident, 1: B.ident}


def test_a_shard_of_which_there_is_no_copy_is_gone() -> None:
    found = commands(taking(), answers((A, report(A, 0)), (B, report(B, 1, incarnation=5))))
    assert isinstance(found[-1], Fail)


def test_servers_know_a_newer_placement() -> None:
    """Server-0 was promoted after the record was written; server-1 follows as a backup."""
    holders = placed(1)
    core = taking(holders=holders)
    newer = answers(
        (A, report(A, 0)),
        (A, report(A, 1, placement=9)),
        (B, report(B, 0, backup=True)),
        (B, report(B, 1, backup=True)),
    )
    assert isinstance(commands(core, newer)[-1], Number)
    assert core.sources() == {0: A.ident, 1: A.ident}
    assert holders.primaries == (0, 0)


def test_of_two_that_say_they_are_the_primary_the_newer_one_is_right() -> None:
    core = taking(holders=placed(1))
    two = answers((A, report(A, 0)), (A, report(A, 1, placement=9)), (B, report(B, 1)), (B, report(B, 0, backup=True)))
    commands(core, two)
    assert core.sources() == {0: A.ident, 1: A.ident}


def test_a_server_is_lost_while_the_job_is_taken_over() -> None:
    core = taking(holders=placed(1))
    full = answers((A, report(A, 0)), (A, report(A, 1, backup=True)), (B, report(B, 1)), (B, report(B, 0, backup=True)))
    commands(core, full, DONE, DONE, DONE, DONE)
    mine = answers((A, report(A, 0)), (A, report(A, 1, backup=True)))
    assert core.handle(mine, 0.1) == Ask((B,), 0.2)
    assert core.handle(Told({}), 1.0) == Later("server-1 was lost just now")
    other = taking()
    assert commands(other, BOTH, DONE, DONE, NotHeard())[-1] == Later("a server did not hear of the new coordinator")


FOLLOW: dict[type[Command], Sequence[type[Command]]] = {
    Ask: (Ask, Number, LookForCheckpoints, Later, Fail, StepDown),
    Number: (Promote, GoBack, Fail),
    Promote: (Obey,),
    Obey: (Publish, Ask, Later),
    Publish: (Ask,),
    LookForCheckpoints: (GoOn,),
}


def walk(seed: int) -> list[Command]:
    """Three servers of which some die, some restart, some have not heard of their promotion; answers are lost."""
    chance = random.Random(seed)
    servers = [member(index) for index in range(3)]
    replicas, checkpoints = chance.randrange(2), chance.random() < 0.5
    holders = placed(replicas, 3)
    alive = set(range(3))
    recorded = list(servers)
    unheard: set[tuple[int, int]] = set()
    if replicas and chance.random() < 0.5:  # the earlier coordinator has promoted backups, and told some of them
        before = holders.primaries
        holders.handle(ServerGone(2, [0, 1]))
        alive.discard(2)
        recorded.pop()
        now_primary = {(server, shard) for shard, server in enumerate(holders.primaries) if before[shard] != server}
        unheard = {one for one in now_primary if chance.random() < 0.7}
    record = replace(
        RECORD,
        ready=chance.random() < 0.8,
        servers=3,
        checkpoints=checkpoints,
        placement=holders.number,
        loading=chance.random() < 0.05,
        recovering=chance.random() < 0.05,
    )
    started = record.ready or chance.random() < 0.5
    fresh: set[int] = set()
    term = chance.choice([3, 3, 3, 3, 4])
    core = Takeover(record, holders, recorded, 4, 0, 0.0, 60.0)
    performed: list[Command] = []
    obeyed, now = False, 0.0
    for _ in range(300):
        performed.append(core.command)
        if core.over:
            break
        now += 0.3
        if chance.random() < 0.04 and alive:
            alive.discard(chance.choice(sorted(alive)))
        if chance.random() < 0.03:
            fresh.add(chance.randrange(3))
        event: Event = DONE
        match core.command:
            case Ask(asked):
                told = {}
                for server in asked:
                    if server.index not in alive or chance.random() < 0.2:
                        continue
                    reports = []
                    for shard, _ in holders.copies(server):
                        waits = (server.index, shard) in unheard
                        backup = holders.primaries[shard] != server.index or (waits and not obeyed)
                        one = report(
                            server, shard, backup=backup, placement=record.placement, term=term, active=started
                        )
                        if server.index in fresh:
                            one = replace(one, incarnation=5, active=False, recorded=False)
                        reports.append(one)
                    told[server.ident] = reports
                event = Told(told, chance.choice([0, 0, 0, 1, 3]) if len(alive) < 3 or fresh else 0)
            case Promote(gone):
                for server in gone:
                    holders.handle(ServerGone(server.index, [one.index for one in recorded if one not in gone]))
            case Obey():
                obeyed = chance.random() < 0.9
                event = DONE if obeyed else NotHeard()
        core.handle(event, now)
    last = performed[-1]
    assert core.over, f"seed {seed}: it comes to an end"
    if isinstance(last, GoOn):
        assert obeyed
        assert len(core.sources()) == len(holders), f"seed {seed}: a shard has no primary"
        assert not any(holders.state(shard).name == "LOST" for shard in range(len(holders)))
        assert not record.loading
        assert not (record.recovering and checkpoints)
    if isinstance(last, GoBack):
        assert checkpoints
    if not any(isinstance(one, Promote) for one in performed):
        assert not isinstance(last, GoOn), "without a command that servers obey, an earlier coordinator may go on"
    return performed


def test_random_schedules() -> None:
    seen = set()
    for seed in range(1500):
        for one, following in itertools.pairwise(walk(seed)):
            assert type(following) in FOLLOW[type(one)], f"{following} after {one}, seed {seed}"
            seen.add((type(one), type(following)))
    assert seen == {(one, following) for one, others in FOLLOW.items() for following in others}
