"""More is pushed than a server can apply: what it takes on is bounded, nobody is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
import torch

from paramserver import errors
from paramserver.server.arithmetic import thread
from paramserver.server.versions.shard import ShardTensors
from paramserver.v1 import shard_pb2
from tests.support.cluster.harness import Cluster, buffered, until
from tests.support.cluster.memory import resident_bytes
from tests.support.cluster.raw import AsyncName, Raw, SyncName

ACCEPTED, DUPLICATE = shard_pb2.OUTCOME_ACCEPTED, shard_pb2.OUTCOME_DUPLICATE
# Numbers of `make test`; those of `make test-soak` are larger.
REJECTED = int(os.environ.get("SOAK_REJECTED", "3000"))
CONTRIBUTIONS = int(os.environ.get("SOAK_CONTRIBUTIONS", "3000"))
CELLS = 64


@contextmanager
def slow_apply(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[list[float]]:
    """Every version takes so long to make; the list has a time for each."""
    build = ShardTensors.build
    made: list[float] = []

    def slow(self: ShardTensors, *args: Any, **kwargs: Any) -> Any:
        made.append(time.monotonic())
        time.sleep(seconds)
        return build(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ShardTensors, "build", slow)
        yield made


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are taken for large ones, whose arithmetic has a thread."""
    monkeypatch.setattr(thread, "_SMALL_BYTES", -1)


async def again_and_again(raw: Raw, frames: list[bytes]) -> tuple[Any, int]:
    """Push as a worker does, with pauses while the server is overloaded; the outcome, and how often it was."""
    refused = 0
    while True:
        try:
            return (await raw.upload(frames)).outcome, refused
        except errors.OverloadedError:
            refused += 1
            await asyncio.sleep(0.02)


def test_h01_thirty_two_pushers_and_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    elements, pushers, room = 1 << 18, 32, 6  # 1 MiB each
    with Cluster(1, 1, "async", "unbounded") as cluster:
        client = cluster.client(0)
        client.init({"ledger": torch.zeros(elements)}, "sum")
        raw = Raw(cluster)
        service = cluster.job.servers[0].service
        service.first.contributions.intake.budget_bytes = room * elements * 4
        contributions = [raw.contribution(AsyncName(0, i), raw.one_hot(0, i)) for i in range(pushers)]
        before, most = resident_bytes(), 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, resident_bytes() - before)
                assert buffered(service) <= room
                await asyncio.sleep(0.005)

        async def everything() -> list[tuple[Any, int]]:
            watching = asyncio.create_task(watch())
            try:
                return await asyncio.gather(*(again_and_again(raw, frames) for frames in contributions))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

        with slow_apply(monkeypatch, 0.02) as made:
            found = raw.run(everything())
        assert len(made) == pushers, "the fault has fired"
        assert [outcome for outcome, _ in found] == [ACCEPTED] * pushers
        assert service.first.contributions.intake.most == room
        assert service.first.contributions.intake.turned_away == sum(refused for _, refused in found) > 0
        print(
            f"H01: {service.first.contributions.intake.turned_away} turned away, memory rose by {most / 2**20:.1f} MiB"
        )
        assert most < pushers * elements * 4
        outcome = cluster.outcome()
        client.close()
    assert outcome.tensor("ledger")[:pushers].tolist() == [1.0] * pushers


def test_a_synchronous_step_is_never_too_large() -> None:
    """All its slices are kept until the last one comes, although they are more than what may arrive at once."""
    with Cluster(1, 1, "sync", slices_per_step=16) as cluster:
        client = cluster.client(0)
        client.init({"ledger": torch.zeros(CELLS)}, "sum")
        raw = Raw(cluster)
        cluster.job.servers[0].service.first.contributions.intake.budget_bytes = 1
        for index in range(16):
            name = SyncName(0, index, index + 1, 16)
            assert raw.push(raw.contribution(name, raw.one_hot(0, index))).outcome == ACCEPTED
        raw.published(1)
        assert cluster.outcome().tensor("ledger")[:16].tolist() == [1.0] * 16
        client.close()


def test_h01_workers_do_not_notice_more_than_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real clients come again by themselves."""
    with Cluster(4, 1, "async", "unbounded") as cluster:
        clients = [cluster.client(index) for index in range(4)]
        for client in clients:
            client.init({"ledger": torch.zeros(CELLS)}, "sum")
        service = cluster.job.servers[0].service
        monkeypatch.setattr("paramserver.server.versions.intake._AT_LEAST", 1)
        service.first.contributions.intake.budget_bytes = 1
        with slow_apply(monkeypatch, 0.02):

            def push(client: Any, first: int) -> None:
                for cell in range(first, first + 4):
                    value = torch.zeros(CELLS)
                    value[cell] = 1.0
                    client.push({"ledger": value})

            workers = [threading.Thread(target=push, args=(client, 4 * i)) for i, client in enumerate(clients)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(20.0)
                assert not worker.is_alive()
        assert service.first.contributions.intake.turned_away > 0
        assert service.first.contributions.intake.most == 1
        outcome = cluster.outcome()
        for client in clients:
            client.close()
    assert outcome.tensor("ledger")[:16].tolist() == [1.0] * 16


def test_h09_a_deadline_that_passes_while_a_push_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gave up, the contribution is applied all the same; its repetition is a duplicate."""
    with Cluster(1, 1, "async", "unbounded") as cluster:
        client = cluster.client(0)
        client.init({"ledger": torch.zeros(CELLS)}, "sum")
        raw = Raw(cluster)
        first, second = (raw.contribution(AsyncName(0, i), raw.one_hot(0, i)) for i in range(2))

        async def both() -> None:
            slow = asyncio.create_task(raw.upload(first))
            await asyncio.sleep(0)
            with pytest.raises(errors.DeadlineError):
                await raw.channel.upload("Shard.Push", second, timeout=0.2)
            assert (await slow).outcome == ACCEPTED

        with slow_apply(monkeypatch, 0.5) as made:
            raw.run(both())
            assert raw.push(second).outcome == DUPLICATE
        assert len(made) == 2
        until("nothing is kept", lambda: not buffered(cluster.job.servers[0].service))
        outcome = cluster.outcome()
        client.close()
    assert outcome.tensor("ledger")[:2].tolist() == [1.0, 1.0]


def test_c08_h10_pulls_are_answered_while_a_version_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(1, 1, "async", "unbounded") as cluster:
        client = cluster.client(0)
        client.init({"ledger": torch.zeros(CELLS)}, "sum")
        raw = Raw(cluster)

        async def go() -> float:
            pushing = asyncio.create_task(raw.upload(raw.contribution(AsyncName(0, 0), raw.one_hot(0, 0))))
            while not made:
                await asyncio.sleep(0.005)
            begin = time.monotonic()
            request = shard_pb2.PullRequest(job=raw.job, timeline=raw.timeline, worker=raw.worker, latest=True)
            versions = [frame async for frame in raw.channel.download("Shard.Pull", request, timeout=5.0)]
            took = time.monotonic() - begin
            assert versions
            assert not pushing.done()
            await pushing
            return took

        with slow_apply(monkeypatch, 1.0) as made:
            took = raw.run(go())
        client.close()
    assert took < 0.5


def test_h13_rejected_pushes_do_not_fill_the_log() -> None:
    with Cluster(1, 1, "async", "unbounded") as cluster:
        client = cluster.client(0)
        client.init({"ledger": torch.zeros(CELLS)}, "sum")
        raw = Raw(cluster)
        header = raw.header(AsyncName(0, 0), [0])
        header.clip_norm = -1.0
        frames = raw.frames(header, raw.parts(raw.one_hot(0, 0)))

        async def everything() -> int:
            refused = 0
            for _ in range(REJECTED):
                try:
                    await raw.upload(frames)
                except errors.ProtocolError:
                    refused += 1
            return refused

        with structlog.testing.capture_logs() as lines:
            assert cluster.job.background.run(everything(), 60.0 + REJECTED / 100) == REJECTED
        print(f"H13: {len(lines)} lines for {REJECTED} rejected pushes")
        assert len(lines) < max(REJECTED // 100, 10)
        assert raw.stats().refused == REJECTED
        client.close()


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_memory_does_not_grow_with_the_number_of_contributions(mode: str) -> None:
    """After a tenth of them and after all; caches that fill up to a bound are full by then."""
    with Cluster(1, 1, mode, "unbounded") as cluster:
        client = cluster.client(0)
        client.init({"ledger": torch.zeros(CELLS)}, "sum")
        raw = Raw(cluster)
        parts = raw.parts(raw.one_hot(0, 0))
        service = cluster.job.servers[0].service

        async def some(first: int, last: int) -> None:
            for index in range(first, last):
                name = AsyncName(0, index) if mode == "async" else SyncName(index, 0, 1, 1)
                while service.first.report().version < index:
                    await asyncio.sleep(0)
                assert (await raw.upload(raw.frames(raw.header(name, [0]), parts))).outcome == ACCEPTED

        tenth = CONTRIBUTIONS // 10
        cluster.job.background.run(some(0, tenth), 60.0 + tenth / 100)
        early = resident_bytes()
        cluster.job.background.run(some(tenth, CONTRIBUTIONS), 60.0 + CONTRIBUTIONS / 100)
        late = resident_bytes()
        grown = (late - early) / (CONTRIBUTIONS - tenth)
        print(
            f"memory, {mode}: {early / 2**20:.1f} MiB after {tenth} contributions, {late / 2**20:.1f} MiB after "
            f"{CONTRIBUTIONS}: {grown:.0f} bytes each"
        )
        raw.published(CONTRIBUTIONS)
        assert raw.stats().applied == CONTRIBUTIONS
        assert late - early < (4 << 20) + 64 * CONTRIBUTIONS
        client.close()
