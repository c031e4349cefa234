"""Readers of an asynchronous job on several servers: every push is in all of what they see or in nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from paramserver import errors
from paramserver.core.versions.names import AsyncName
from paramserver.server.rpc.control import Control
from paramserver.v1 import shard_pb2
from paramserver.worker.client import RawClient
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Cluster, until
from tests.support.cluster.raw import Raw

SHAPE = 96  # float64: 12 chunks of 64 bytes, on all servers


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts wait for less, and what is gathered is not waited for."""
    monkeypatch.setattr("paramserver.coordinator.leadership.snapshots._PATIENCE_S", (0.05, 0.2))
    monkeypatch.setattr("paramserver.results.collect._SETTLE_S", 0.2)


@contextmanager
def adding(cluster: Cluster, workers: int, plan: FaultPlan | None = None) -> Iterator[list[int]]:
    """Clients that push ones until the block ends; how often each has."""
    stop = threading.Event()
    counts = [0] * workers
    failures: list[BaseException] = []
    made = [cluster.client(index, plan, chunk_bytes=64) for index in range(workers)]

    def add(index: int) -> None:
        try:
            made[index].init({"x": np.zeros(SHAPE)})
            while not stop.is_set():
                made[index].push({"x": np.ones(SHAPE)})
                counts[index] += 1
            made[index].close()  # or others wait for its part of a step
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(index,), daemon=True) for index in range(workers)]
    for thread in threads:
        thread.start()
    try:
        until("all push", lambda: failures or min(counts) > 3)
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(20.0)
    assert not failures, failures


def watch(reader: RawClient, pulls: int, consistent: bool = True) -> tuple[int, int]:
    """Pull so often; how many pulls mixed updates, and how many updates went by meanwhile."""
    seen = [reader.pull(consistent=consistent)["x"] for _ in range(pulls)]
    mixed = sum(len(np.unique(one)) > 1 for one in seen)
    return mixed, int(seen[-1].max() - seen[0].min())


def test_a_reader_sees_each_push_in_everything_or_in_nothing() -> None:
    """Issue 14, item 8. Pushes reach the servers in different orders, some twice, some again after a lost reply."""
    plan = FaultPlan(
        [
            Rule("Shard.Push", Fault.LOSE_REPLY, 0.05),
            Rule("Shard.Push", Fault.DUPLICATE, 0.1),
            Rule("Shard.Push", Fault.DELAY, 0.5, delay_s=0.01),
        ]
    )
    with Cluster(3, 3, "async", "unbounded") as cluster, adding(cluster, 3, plan) as counts:
        reader = cluster.reader()
        until("a pull that mixes", lambda: watch(reader, 1, consistent=False)[0])
        before = sum(counts)
        mixed, updates = watch(reader, 100)
        assert mixed == 0
        assert updates > 50, "the arrays were moving all the time"
        assert sum(counts) - before > 50
        # A push that has returned is seen: a cut that was begun before it does not do.
        for _ in range(20):
            returned = sum(counts)
            assert reader.pull()["x"].min() >= returned
        reader.close()
    plan.check()


def test_several_readers_at_once_over_bad_lines() -> None:
    plan = FaultPlan(
        [
            Rule("Shard.Pull", Fault.LOSE_REPLY, 0.05),
            Rule("Coordinator.Snapshot", Fault.LOSE_REPLY, 0.2),
            Rule("Coordinator.Snapshot", Fault.DROP_REQUEST, 0.2),
        ]
    )
    with Cluster(2, 2, "async", 2) as cluster, adding(cluster, 2):
        readers = [cluster.reader(plan) for _ in range(3)]
        results: list[tuple[int, int]] = []
        threads = [threading.Thread(target=lambda r=r: results.append(watch(r, 60)), daemon=True) for r in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40.0)
        assert len(results) == 3
        assert [mixed for mixed, _ in results] == [0, 0, 0]
        assert all(updates > 0 for _, updates in results)
        # A reader asks for a snapshot only if the shards differ at that moment: how often depends on the machine.
        until("each planned fault", lambda: watch(readers[0], 5)[0] == 0 and not plan.idle())
        for reader in readers:
            reader.close()
    plan.check()


def test_half_a_push_is_waited_for_and_then_named() -> None:
    """Its worker has reached one server and no other."""
    with Cluster(1, 2, "async", wait_timeout_s=0.5) as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({"x": np.zeros(SHAPE)})
        client.push({"x": np.ones(SHAPE)})
        halves = [Raw(cluster, server) for server in range(2)]
        name = AsyncName(0, 7)
        ones = {0: torch.ones(SHAPE, dtype=torch.float64)}
        halves[0].push(halves[0].contribution(name, ones))
        with pytest.raises(errors.DeadlineError, match=r"server-1: epoch 0, slice 7 has not come.*consistent=False"):
            client.pull()
        assert sorted(np.unique(client.pull(consistent=False)["x"])) == [1.0, 2.0]
        # Nobody is held up by that.
        client.push({"x": np.ones(SHAPE)})
        assert sorted(np.unique(client.pull(consistent=False)["x"])) == [2.0, 3.0]
        with pytest.raises(errors.UnavailableError, match="the servers hold different versions"):
            cluster.outcome()
        halves[1].push(halves[1].contribution(name, ones))
        assert set(client.pull()["x"]) == {3.0}
        client.close()


def test_a_reader_that_comes_while_the_other_half_is_under_way_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking: list[shard_pb2.CutResponse] = []
    cut = Control.cut

    async def seen(self: Control, request: shard_pb2.CutRequest) -> shard_pb2.CutResponse:
        reply = await cut(self, request)
        if request.step == shard_pb2.CutRequest.STEP_REACH and not reply.taken:
            lacking.append(reply)
        return reply

    monkeypatch.setattr(Control, "cut", seen)
    with Cluster(1, 2, "async") as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({"x": np.zeros(SHAPE)})
        ones = {0: torch.ones(SHAPE, dtype=torch.float64)}
        halves = [Raw(cluster, server) for server in range(2)]
        halves[1].push(halves[1].contribution(AsyncName(0, 7), ones))
        got: list[set[float]] = []
        reading = threading.Thread(target=lambda: got.append(set(client.pull()["x"])), daemon=True)
        reading.start()
        until("a cut was tried in vain", lambda: lacking)
        halves[0].push(halves[0].contribution(AsyncName(0, 7), ones))
        reading.join(20.0)
        assert got == [{1.0}]
        client.close()


def test_a_reader_goes_on_when_the_job_becomes_synchronous() -> None:
    with Cluster(2, 3, "async", "unbounded") as cluster, adding(cluster, 2):
        reader = cluster.reader()
        assert watch(reader, 10)[0] == 0
        cluster.set_consistency("sync")
        assert watch(reader, 20)[0] == 0
        cluster.set_consistency("async", "unbounded")
        assert watch(reader, 20)[0] == 0
        reader.close()


def test_updates_in_as_many_versions_are_not_taken_for_the_same() -> None:
    """At the end: one half each of two pushes."""
    with Cluster(1, 2, "async") as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({"x": np.zeros(SHAPE)})
        ones = {0: torch.ones(SHAPE, dtype=torch.float64)}
        for server in range(2):
            raw = Raw(cluster, server)
            raw.push(raw.contribution(AsyncName(0, 7 + server), ones))
        with pytest.raises(errors.UnavailableError, match="different contributions, in as many updates"):
            cluster.outcome()
        client.close()
