"""Which server holds which shard, and the reports of several shards of a server as one."""

from __future__ import annotations

from paramserver.coordinator.reports import combined
from paramserver.core.job.holders import (
    Balance,
    BegunAnew,
    CaughtUp,
    Cover,
    Found,
    Held,
    Holders,
    Retires,
    ServerGone,
    ServersThere,
)
from paramserver.v1 import shard_pb2


def test_one_shard_on_each_server() -> None:
    holders = Holders.plan(3)
    assert holders.primaries == (0, 1, 2)
    assert [holders.shards_of(server) for server in range(4)] == [[0], [1], [2], []]


def test_several_shards_on_a_server() -> None:
    holders = Holders((1, 0, 1))
    assert len(holders) == 3
    assert [holders.shards_of(server) for server in range(2)] == [[1], [0, 2]]


def test_the_shard_that_is_behind_speaks_for_its_server() -> None:
    ahead = shard_pb2.StatsResponse(shard=0, version=5, applied=9, shard_bytes=64, bytes_pushed=1, bytes_pulled=10)
    behind = shard_pb2.StatsResponse(
        shard=2, version=4, applied=9, shard_bytes=128, bytes_pushed=2, bytes_pulled=20, waiting_for="step 4: slice 1"
    )
    assert combined([ahead]) == ahead
    whole = combined([ahead, behind])
    assert (whole.version, whole.applied, whole.waiting_for) == (4, 9, "step 4: slice 1")
    assert (whole.shard_bytes, whole.bytes_pushed, whole.bytes_pulled) == (192, 3, 30)
    assert (ahead.shard_bytes, behind.shard_bytes) == (64, 128), "the reports stay as they are"


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
