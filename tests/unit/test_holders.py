"""Which server holds which shard: the planned placement, and what follows when servers come, go and catch up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paramserver.coordinator.reports import combined
from paramserver.core.job.held import Backup, Held
from paramserver.core.job.holders import (
    Balance,
    BegunAnew,
    CaughtUp,
    Cover,
    Found,
    Holders,
    Lost,
    Promote,
    Retires,
    ServerGone,
    ServersThere,
)
from paramserver.core.job.membership import Member, Role
from paramserver.v1 import shard_pb2
from tests.support.marks import long_but


def server(index: int) -> Member:
    return Member(ident=index + 1, role=Role.SERVER, index=index, name=f"server-{index}", expires_at=0.0)


def whole(servers: int, replicas: int = 1) -> Holders:
    """All servers are there, and all backups have caught up."""
    holders = Holders.plan(servers, replicas)
    holders.handle(ServersThere(range(servers)))
    catch_up(holders, range(servers))
    return holders


def catch_up(holders: Holders, present: range | list[int]) -> None:
    for shard, index in holders.catching_up(present):
        backup = holders.shards[shard].backup(index)
        assert backup is not None
        assert holders.handle(CaughtUp(shard, index, backup.since)) == []


def test_one_shard_on_each_server() -> None:
    holders = Holders.plan(3)
    assert holders.primaries == (0, 1, 2)
    assert [holders.shards_of(index) for index in range(4)] == [[0], [1], [2], []]
    assert [holders.places(server(1)), holders.copies(server(1))] == [[(1, server(1))]] * 2
    assert holders.handle(ServersThere(range(3))) == []
    assert holders.number == 0, "without replicas nothing changes"


def test_several_shards_on_a_server() -> None:
    holders = Holders((1, 0, 1))
    assert len(holders) == 3
    assert [holders.shards_of(index) for index in range(2)] == [[1], [0, 2]]


@pytest.mark.parametrize(("servers", "shards"), [(2, 2), (3, 6), (4, 12), (5, 20), (8, 32)])
def test_each_server_is_the_primary_of_as_many_shards_with_backups_on_different_servers(
    servers: int, shards: int
) -> None:
    holders = whole(servers)
    assert len(holders) == shards
    assert set(Counter(holders.primaries).values()) == {shards // servers}
    for index in range(servers):
        beside = [held.backups[0].server for held in holders.shards if held.primary == index]
        assert len(set(beside)) == len(beside)
        assert index not in beside
    held = Counter(one.server for shard in holders.shards for one in shard.backups)
    assert max(held.values()) - min(held.values()) <= 1
    assert holders.settled(range(servers))


@pytest.mark.parametrize("servers", [3, 4, 5])
def test_the_shards_of_a_server_that_is_lost_go_to_all_others_evenly(servers: int) -> None:
    holders = whole(servers)
    present = [index for index in range(servers) if index != 1]
    effects = holders.handle(ServerGone(1, present))
    assert {type(effect) for effect in effects} == {Promote}
    assert holders.promotions == len(effects) == servers - 1
    assert set(Counter(holders.primaries).values()) == {servers}


def test_a_backup_that_has_not_caught_up_takes_no_place() -> None:
    holders = Holders.plan(2, 1)
    holders.handle(ServersThere([0, 1]))
    assert not holders.covered(1, [0])
    assert holders.handle(ServerGone(1, [0])) == [Lost(1)]
    assert holders.shards[1].lost
    assert holders.handle(ServersThere([0, 1])) == [], "it has come back with its shard"
    assert not holders.shards[1].lost


def test_an_old_report_of_a_backup_that_has_begun_anew_counts_for_nothing() -> None:
    holders = whole(2)
    holders.handle(ServerGone(1, [0]))
    since = holders.number
    holders.handle(ServersThere([0, 1]))
    assert holders.shards[0].backups == (Backup(1, since + 1),)
    holders.handle(CaughtUp(0, 1, 1))
    assert holders.shards[0].backups == (Backup(1, since + 1),)
    holders.handle(CaughtUp(0, 1, since + 1))
    assert holders.shards[0].backups == (Backup(1, since + 1, whole=True),)


def test_a_server_that_retires_gives_its_shards_away_and_gets_none() -> None:
    holders = whole(3)
    effects = holders.handle(Retires(2, [0, 1]))
    assert {type(effect) for effect in effects} == {Promote}
    assert holders.promotions == 0, "nothing was lost"
    holders.handle(ServersThere([0, 1, 2]))
    assert all(held.primary != 2 and held.backup(2) is None for held in holders.shards)
    holders.handle(ServerGone(2, [0, 1]))
    holders.handle(ServersThere([0, 1, 2]))  # another one in its place
    for _ in range(20):
        catch_up(holders, range(3))
        holders.handle(Balance([0, 1, 2]))
    assert holders.settled([0, 1, 2])


def test_a_server_that_has_come_back_gets_shards_one_after_the_other() -> None:
    holders = whole(3)
    holders.handle(ServerGone(1, [0, 2]))
    holders.handle(ServersThere([0, 1, 2]))
    assert holders.handle(Balance([0, 1, 2])) == [], "not while it catches up"
    moves = 0
    while not holders.settled(range(3)):
        catch_up(holders, range(3))
        moves += len(holders.handle(Balance([0, 1, 2])))
    assert set(Counter(holders.primaries).values()) == {2}
    assert moves == 2


def test_a_server_that_comes_after_its_seat_was_taken_copies_each_shard_once() -> None:
    """Primaries name their whole backups in each report. Before, such a report took the copy from the newcomer."""
    holders = Holders.spread(3, replicated(2))
    left = [1, 2]
    holders.handle(ServerGone(0, left))
    holders.handle(ServersThere(left))
    all_catch_up(holders)
    present, changes = range(3), -1
    while changes != holders.number:
        changes = holders.number
        holders.handle(Balance(present))
        for shard, held in enumerate(holders.shards):
            for one in held.backups:
                if one.whole:
                    holders.handle(CaughtUp(shard, one.server, one.since))
        assert holders.number < 40
        all_catch_up(holders)
    assert holders.settled(present)


def test_a_timeline_begins_at_the_planned_primaries_or_where_they_are() -> None:
    for stay, primaries in ((True, (0, 0)), (False, (0, 1))):
        holders = whole(2)
        holders.handle(ServerGone(1, [0]))
        number = holders.number
        holders.handle(BegunAnew(stay))
        assert holders.primaries == primaries
        assert holders.number > number
        assert not any(held.backups for held in holders.shards)


def test_another_coordinator_finds_a_primary_that_the_record_does_not_know() -> None:
    holders = whole(2)
    holders.handle(Found(1, 0))
    assert holders.primaries == (0, 0)
    holders.handle(ServersThere([0, 1]))
    assert [one.server for one in holders.shards[1].backups] == [1]


def test_the_shard_that_is_behind_speaks_for_its_server() -> None:
    ahead = shard_pb2.StatsResponse(shard=0, version=5, applied=9, shard_bytes=64, bytes_pushed=1, bytes_pulled=10)
    behind = shard_pb2.StatsResponse(
        shard=2, version=4, applied=9, shard_bytes=128, bytes_pushed=2, bytes_pulled=20, waiting_for="step 4: slice 1"
    )
    copy = shard_pb2.StatsResponse(shard=3, version=1, shard_bytes=9, backup=True)
    assert combined([ahead]) == ahead
    both = combined([ahead, behind, copy])
    assert (both.version, both.applied, both.waiting_for) == (4, 9, "step 4: slice 1")
    assert (both.shard_bytes, both.bytes_pushed, both.bytes_pulled) == (192, 3, 30)
    assert (ahead.shard_bytes, behind.shard_bytes) == (64, 128), "the reports stay as they are"


@pytest.mark.parametrize("seed", long_but(range(70), range(200)))
def test_random_schedules(seed: int) -> None:
    """No shard goes to a server that lacks it, none is lost while there is a copy, and in the end all are spread."""
    chance = random.Random(seed)
    servers, replicas = chance.randint(2, 6), chance.choice([1, 1, 2])
    replicas = min(replicas, servers - 1)
    holders = Holders.plan(servers, replicas)
    present = set(range(servers))
    # By shard, the servers that really have all of it.
    have = [{held.primary} for held in holders.shards]
    for _ in range(300):
        number, before = holders.number, holders.shards
        match chance.choice(["there", "gone", "caught up", "caught up", "balance", "retires"]):
            case "there":
                if away := sorted(set(range(servers)) - present):
                    present.add(chance.choice(away))
                effects = holders.handle(ServersThere(sorted(present)))
            case "gone" if len(present) > 1:
                one = chance.choice(sorted(present))
                if not holders.covered(one, sorted(present - {one})):
                    continue  # the job would go back
                present.remove(one)
                for copies in have:
                    copies.discard(one)
                effects = holders.handle(ServerGone(one, sorted(present)))
            case "retires" if len(present) > 1:
                one = chance.choice(sorted(present))
                rest = sorted(present - {one})
                if not holders.covered(one, rest):
                    continue
                effects = holders.handle(Retires(one, rest))
            case "balance":
                effects = holders.handle(Balance(sorted(present)))
            case _:
                open_ = holders.catching_up(sorted(present))
                if not open_:
                    continue
                shard, one = chance.choice(open_)
                backup = holders.shards[shard].backup(one)
                assert backup is not None
                have[shard].add(one)
                effects = holders.handle(CaughtUp(shard, one, backup.since))
        assert (holders.number > number) == (holders.shards != before)
        for effect in effects:
            assert isinstance(effect, Promote), "no shard is lost"
            assert effect.server in have[effect.shard]
            assert holders.shards[effect.shard].primary == effect.server
            have[effect.shard] = {effect.server}  # others may have been sent more or less
        for shard, held in enumerate(holders.shards):
            assert held.primary in have[shard]
            servers_of = [held.primary, *(one.server for one in held.backups)]
            assert len(set(servers_of)) == len(servers_of) <= 2 + replicas
            assert all(one.server in have[shard] for one in held.backups if one.whole)
    everybody = list(range(servers))
    for one in everybody:
        if one in holders.retiring:
            holders.handle(ServerGone(one, [other for other in everybody if other != one and other in present]))
    for _ in range(20 * len(holders)):
        holders.handle(ServersThere(everybody))
        catch_up(holders, everybody)
        holders.handle(Balance(everybody))
    assert holders.settled(everybody), f"seed {seed}: {holders.shards}"


# ---- how well shards are protected, and what is counted


def all_catch_up(holders: Holders) -> None:
    for shard, held in enumerate(holders.shards):
        for one in held.backups:
            holders.handle(CaughtUp(shard, one.server, one.since))


def replicated(servers: int, replicas: int = 1) -> Holders:
    """A placement in which all shards have all their backups."""
    holders = Holders.plan(servers, replicas)
    holders.handle(ServersThere(range(servers)))
    all_catch_up(holders)
    assert holders.replicated
    return holders


def states(holders: Holders) -> list[str]:
    return [holders.state(shard) for shard in range(len(holders))]


def test_the_state_of_each_shard() -> None:
    holders = Holders.plan(2, 1)
    assert states(holders) == [Cover.NO_BACKUP, Cover.NO_BACKUP]
    holders.handle(ServersThere((0, 1)))
    assert states(holders) == [Cover.CATCHING_UP, Cover.CATCHING_UP]
    holders.handle(CaughtUp(0, 1, holders.shards[0].backups[0].since))
    assert states(holders) == [Cover.REPLICATED, Cover.CATCHING_UP]
    holders.handle(ServerGone(1, (0,)))
    assert states(holders) == [Cover.NO_BACKUP, Cover.LOST], "the backup of shard 1 was not whole"


def test_one_of_two_backups_is_not_enough() -> None:
    holders = replicated(3, 2)
    holders.handle(ServerGone(2, (0, 1)))
    assert {*states(holders)} <= {Cover.NO_BACKUP, Cover.CATCHING_UP}


def test_without_replicas_a_shard_lacks_nothing_and_nothing_is_counted() -> None:
    holders = Holders.plan(2)
    assert holders.replicated
    holders.handle(ServerGone(1, (0,)))
    assert states(holders) == [Cover.REPLICATED, Cover.LOST]
    holders.handle(ServersThere((0, 1)))
    assert (holders.takeovers, holders.repairs, holders.hurt, holders.replicated) == (0, 0, False, True)


def test_a_takeover_is_counted_once_however_many_shards_the_server_had() -> None:
    holders = replicated(3)
    holders.handle(ServerGone(1, (0, 2)))
    assert (holders.promotions, holders.takeovers, holders.repairs, holders.hurt) == (2, 1, 0, True)
    holders.handle(ServersThere((0, 1, 2)))
    assert not holders.repairs, "the backups have still to catch up"
    all_catch_up(holders)
    assert (holders.takeovers, holders.repairs, holders.hurt) == (1, 1, False)


def test_the_first_backups_of_a_job_are_no_repair() -> None:
    assert replicated(3).repairs == 0


def test_a_lost_server_that_was_a_backup_only_is_repaired_but_nobody_took_over() -> None:
    holders = replicated(2)
    holders.handle(ServerGone(1, (0,)))
    holders.handle(ServersThere((0, 1)))
    all_catch_up(holders)
    holders.handle(ServerGone(1, (0,)))  # it is the primary of no shard
    assert (holders.takeovers, holders.repairs, holders.hurt) == (1, 1, True)
    holders.handle(ServersThere((0, 1)))
    all_catch_up(holders)
    assert (holders.takeovers, holders.repairs) == (1, 2)


def test_moves_by_wish_are_neither_takeovers_nor_repairs() -> None:
    holders = replicated(2)
    holders.handle(Retires(1, (0,)))
    holders.handle(ServerGone(1, (0,)))
    assert (holders.takeovers, holders.hurt, holders.replicated) == (0, False, False)
    holders.handle(ServersThere((0, 1)))
    all_catch_up(holders)
    holders.handle(Balance((0, 1)))
    all_catch_up(holders)
    assert (holders.takeovers, holders.repairs, holders.hurt) == (0, 0, False)


def test_another_timeline_begins_with_new_backups() -> None:
    holders = replicated(2)
    holders.handle(ServerGone(1, (0,)))
    holders.handle(BegunAnew(stay=False))
    holders.handle(ServersThere((0, 1)))
    all_catch_up(holders)
    assert (holders.takeovers, holders.repairs, holders.hurt) == (1, 0, False)


def test_a_takeover_that_an_earlier_coordinator_did_not_write_down_is_counted_once() -> None:
    holders = replicated(3)
    for shard in holders.shards_of(1):
        holders.handle(Found(shard, holders.shards[shard].backups[0].server))
    assert (holders.promotions, holders.takeovers) == (2, 1)


def test_another_coordinator_goes_on_counting() -> None:
    other = Holders.plan(2, 1)
    other.restore(7, 3, [Held(0), Held(0)], takeovers=2, repairs=1, hurt=True)
    assert (other.number, other.promotions, other.takeovers, other.repairs) == (7, 3, 2, 1)
    other.handle(ServersThere((0, 1)))
    all_catch_up(other)
    assert (other.repairs, other.hurt) == (2, False)
