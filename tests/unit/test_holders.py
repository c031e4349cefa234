"""Which server holds which shard, and the reports of several shards of a server as one."""

from __future__ import annotations

from paramserver.coordinator.reports import combined
from paramserver.core.job.holders import Holders
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
