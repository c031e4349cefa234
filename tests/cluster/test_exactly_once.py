"""Whatever happens to a message on its way, the work in it counts once. Ledgers of one-hot contributions show it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from paramserver import errors
from paramserver.v1 import shard_pb2
from paramserver.worker.client import Array, RawClient
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Cluster, Outcome, buffered
from tests.support.cluster.raw import AsyncName, Raw, SyncName
from tests.support.marks import long_but

DUPLICATE, ACCEPTED = shard_pb2.OUTCOME_DUPLICATE, shard_pb2.OUTCOME_ACCEPTED


def cells(outcome: Outcome, name: str = "ledger") -> list[float]:
    found: list[float] = outcome.tensor(name).tolist()
    return found


def start(client: RawClient, count: int, name: str = "ledger") -> None:
    client.init({name: torch.zeros(count)}, "sum")


def one_hot(count: int, cell: int, name: str = "ledger") -> dict[str, Array]:
    value = torch.zeros(count)
    value[cell] = 1.0
    return {name: value}


FAULTS = {
    "reply lost (A01)": Rule("Shard.Push", Fault.LOSE_REPLY, share=0.3),
    "request lost (A02)": Rule("Shard.Push", Fault.DROP_REQUEST, share=0.3),
    "sent twice": Rule("Shard.Push", Fault.DUPLICATE, share=0.3),
    "cut short": Rule("Shard.Push", Fault.CUT_UPLOAD, share=0.3),
    "late": Rule("Shard.Push", Fault.DELAY, share=0.3),
    "pull lost": Rule("Shard.Pull", Fault.LOSE_REPLY, share=0.3),
    "lease lost": Rule("Coordinator.Lease", Fault.LOSE_REPLY, share=0.3),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", long_but({"reply lost (A01)", "sent twice", "cut short"}, FAULTS))
def test_one_client_with_a_bad_line(name: str, mode: str) -> None:
    plan = FaultPlan([FAULTS[name]], seed=3)
    with Cluster(1, 2, mode) as cluster:
        client = cluster.client(0, plan, chunk_bytes=64)
        start(client, 40)
        for cell in range(40):
            client.push(one_hot(40, cell))
        outcome = cluster.outcome()
        assert client.version == 40
        client.close()
    assert cells(outcome) == [1.0] * 40
    assert outcome.summary["contributions_applied"] == 40
    if not (mode == "sync" and name == "lease lost"):  # there is no leasing in synchronous mode
        plan.check()
    if name in ("reply lost (A01)", "sent twice"):
        assert outcome.summary["contributions_duplicate"] > 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_push_a_hundred_times_at_once(mode: str) -> None:
    """A03."""
    with Cluster(1, 1, mode, slices_per_step=2) as cluster:
        client = cluster.client(0)
        start(client, 4)
        raw = Raw(cluster)
        frames = raw.contribution(SyncName(0, 0, 1, 2) if mode == "sync" else AsyncName(0, 7), raw.one_hot(0, 1))

        async def everything() -> list[shard_pb2.PushResponse]:
            return await asyncio.gather(*(raw.upload(frames) for _ in range(100)))

        replies = raw.run(everything())
        outcomes = [reply.outcome for reply in replies]
        assert outcomes.count(ACCEPTED) == 1
        assert outcomes.count(DUPLICATE) == 99
        assert len({reply.version for reply in replies}) == 1
        if mode == "sync":  # the step lacks its second slice
            assert raw.stats().version == 0
            raw.push(raw.contribution(SyncName(0, 1, 2, 2), raw.one_hot(0, 2)))
        raw.published(1)
        outcome = cluster.outcome()
        client.close()
    assert cells(outcome) == [0.0, 1.0, 1.0 if mode == "sync" else 0.0, 0.0]
    assert outcome.summary["contributions_duplicate"] == 99


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_of_the_same_name_with_other_bytes_the_first_counts(mode: str) -> None:
    """A05, and A06: long afterwards it still is a duplicate."""
    with Cluster(1, 1, mode) as cluster:
        client = cluster.client(0)
        start(client, 60)
        raw = Raw(cluster)
        name = SyncName(0, 0, 1, 1) if mode == "sync" else AsyncName(0, 1000)
        assert raw.push(raw.contribution(name, raw.one_hot(0, 0))).outcome == ACCEPTED
        assert raw.push(raw.contribution(name, raw.one_hot(0, 1))).outcome == DUPLICATE
        for cell in range(2, 52):
            raw.published(cell - 1)
            later = SyncName(cell - 1, 0, 1, 1) if mode == "sync" else AsyncName(0, 1000 + cell)
            raw.push(raw.contribution(later, raw.one_hot(0, cell)))
        assert raw.push(raw.contribution(name, raw.one_hot(0, 1))).outcome == DUPLICATE
        raw.published(51)
        outcome = cluster.outcome()
        client.close()
    assert cells(outcome) == [1.0, 0.0, *[1.0] * 50, *[0.0] * 8]


@pytest.mark.parametrize("each", long_but([30], [30, 60]))
def test_many_threads_of_many_clients(each: int) -> None:
    """A11: every cell exactly once, over several servers, whoever pushes it."""
    clients, threads = 4, 4
    total = clients * threads * each
    failures: list[BaseException] = []

    def work(client: RawClient, first: int) -> None:
        try:
            for cell in range(first, first + each):
                client.push(one_hot(total, cell))
        except BaseException as error:
            failures.append(error)

    with Cluster(clients, 2, "async", "unbounded") as cluster:
        everybody = [cluster.client(index, chunk_bytes=1024) for index in range(clients)]
        for client in everybody:
            start(client, total)
        running = [
            threading.Thread(target=work, args=(everybody[i % clients], i * each), daemon=True)
            for i in range(clients * threads)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60.0)
            assert not thread.is_alive(), cluster.where_it_stands()
        assert not failures
        outcome = cluster.outcome()
        for client in everybody:
            client.close()
    assert cells(outcome) == [1.0] * total
    assert outcome.summary["contributions_applied"] == total == outcome.summary["steps"]


def breaking(frames: list[bytes], after: int) -> Iterator[bytes]:
    """The sender dies."""
    yield from frames[:after]
    raise ConnectionResetError("the sender died")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("after", [1, 3, 7])
def test_a_sender_that_dies_in_the_middle_has_sent_nothing(after: int, mode: str) -> None:
    """A15: nothing is staged, the slice is still open, and whoever brings it whole later is the first."""
    with Cluster(1, 1, mode) as cluster:
        client = cluster.client(0, chunk_bytes=64)
        start(client, 7 * 16)
        raw = Raw(cluster)
        name = SyncName(0, 0, 1, 1) if mode == "sync" else AsyncName(0, 0)
        frames = raw.contribution(name, {0: torch.ones(112)}, single=True)
        assert len(frames) == 8
        with pytest.raises(ConnectionResetError):
            raw.push(breaking(frames, after))
        stats = raw.stats()
        assert (stats.applied, stats.version, stats.bytes_pushed) == (0, 0, 0)
        service = cluster.job.servers[0].service
        assert not buffered(service)
        assert raw.push(frames).outcome == ACCEPTED
        raw.published(1)
        outcome = cluster.outcome()
        client.close()
    assert cells(outcome) == [1.0] * 112


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_push_with_one_bad_tensor_applies_none(bad: int, mode: str) -> None:
    """A16."""
    with Cluster(1, 1, mode) as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({key: torch.zeros(16) for key in "abc"}, "sum")
        raw = Raw(cluster)
        name = SyncName(0, 0, 1, 1) if mode == "sync" else AsyncName(0, 0)
        values = {index: torch.full((16,), float("inf") if index == bad else 1.0) for index in range(3)}
        with pytest.raises(errors.NonFiniteError, match=f"worker 999.*'{'abc'[bad]}' is not finite"):
            raw.push(raw.contribution(name, values))
        assert raw.stats().applied == 0
        assert raw.push(raw.contribution(name, {0: torch.ones(16), 2: torch.ones(16)})).outcome == ACCEPTED
        raw.published(1)
        outcome = cluster.outcome()
        client.close()
    assert [cells(outcome, key)[0] for key in "abc"] == [1.0, 0.0, 1.0]


def test_two_workers_with_the_same_slices() -> None:
    """Nodes of the tree that overlap: a slice counts once, whether it comes alone or in a sum with its neighbours."""
    with Cluster(1, 1, slices_per_step=4) as cluster:
        client = cluster.client(0)
        start(client, 4)
        raw = Raw(cluster)

        def part(lo: int, hi: int) -> list[bytes]:
            value = torch.zeros(4)
            value[lo:hi] = 1.0
            return raw.contribution(SyncName(0, lo, hi, 4), {0: value})

        assert raw.push(part(1, 2)).outcome == ACCEPTED
        assert raw.push(part(2, 4)).outcome == ACCEPTED
        assert raw.push(part(2, 3)).outcome == DUPLICATE
        assert raw.push(part(0, 2)).outcome == ACCEPTED  # in place of slice 1, which it contains
        assert raw.push(part(0, 1)).outcome == DUPLICATE
        raw.published(1)
        outcome = cluster.outcome()
        assert raw.stats().applied == 4
        client.close()
    assert cells(outcome) == [1.0] * 4
