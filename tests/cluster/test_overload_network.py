"""Overload over real connections: too many calls at once, and a peer that does not read what it asked for."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from contextlib import aclosing
from typing import Any

import pytest
import torch

from paramserver import errors, logs
from paramserver.coordinator.endpoint import Endpoint
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.membership import Presence, Role
from paramserver.core.shards.published import KEPT_VERSIONS
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership import session
from paramserver.membership.joining import JoinOptions
from paramserver.membership.session import Session
from paramserver.server.versions.version import Version
from paramserver.store.memory import MemoryStore
from paramserver.transport import grpc
from paramserver.transport.limits import Limits
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.cluster.harness import Cluster
from tests.support.cluster.memory import resident_bytes
from tests.support.cluster.raw import AsyncName, Raw

MIB = 1 << 20
# Of the weights that somebody asks for and does not read.
PULL_MIB = int(os.environ.get("SOAK_PULL_MIB", "16"))


def test_h02_members_are_heard_while_too_much_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 calls at once where 32 are answered: the others are refused at once, and nobody is given up for lost."""
    monkeypatch.setattr(session, "_REPORT_S", 0.1)
    logs.configure("error")
    lease_s, calls, limit = 1.0, 256, 32
    released = asyncio.Event()
    parked = 0

    async def probe(request: coordinator_pb2.ProbeRequest) -> coordinator_pb2.ProbeResponse:
        nonlocal parked
        parked += 1
        await released.wait()
        return coordinator_pb2.ProbeResponse()

    async def go() -> None:
        journal = await Journal.open(MemoryStore(), "memory", 1)
        options = JobOptions("test", 1, 1, Consistency(Mode.SYNC), lease_s=lease_s)
        service = CoordinatorService(options, grpc.connect, journal)
        service.probe = probe
        await service.start()
        endpoint = Endpoint("test")
        endpoint.service = service
        server = await grpc.serve([("Coordinator", endpoint)], limits=Limits(calls=limit))
        member = Session(
            grpc.connect(server.address),
            JoinOptions(types_pb2.ROLE_WORKER, "test", pid=1),
            lambda: coordinator_pb2.SessionRequest(worker=coordinator_pb2.WorkerReport()),
        )
        await member.join()
        channel = grpc.connect(server.address)
        begin = time.monotonic()

        async def ask() -> tuple[str, float]:
            try:
                await channel.call("Coordinator.Probe", coordinator_pb2.ProbeRequest(), timeout=30.0)
            except errors.OverloadedError:
                return "refused", time.monotonic() - begin
            return "answered", time.monotonic() - begin

        asking = [asyncio.create_task(ask()) for _ in range(calls)]
        await asyncio.sleep(3 * lease_s)  # many times what the member has between two signs of life
        waiting = sum(1 for task in asking if not task.done())
        found = [task.result() for task in asking if task.done()]
        assert {kind for kind, _ in found} == {"refused"}
        assert 0 < parked == waiting <= limit
        assert len(found) == calls - waiting
        print(f"H02: {len(found)} of {calls} refused within {max(took for _, took in found):.2f} s")
        assert max(took for _, took in found) < 2 * lease_s
        (heard,) = service.job.members.of(Role.WORKER)
        assert heard.presence is Presence.CONNECTED
        assert heard.ident == member.member
        assert service.job.reports.losses == 0
        released.set()
        assert {(await task)[0] for task in asking} == {"answered", "refused"}
        await member.leave()
        await channel.close()
        await member.channel.close()
        await server.stop()
        await service.close()

    asyncio.run(go())


def versions_alive() -> int:
    """How many versions of weights there are in this process."""
    return sum(type(thing) is Version for thing in gc.get_objects())


def test_h04_a_client_that_does_not_read_what_it_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """It waits for itself; others get their weights, new versions are made, and memory stays within bounds."""
    elements = PULL_MIB * MIB // 4
    gc.collect()
    others = versions_alive()  # of tests before this one
    with Cluster(1, 1, "async", "unbounded") as cluster:
        client = cluster.client(0)
        client.init({"weights": torch.zeros(elements)}, "sum")
        raw = Raw(cluster)
        service = cluster.job.servers[0].service
        request = shard_pb2.PullRequest(job=raw.job, timeline=raw.timeline, worker=raw.worker, latest=True)

        async def pull(channel: Any) -> int:
            return sum([len(frame) async for frame in channel.download("Shard.Pull", request, timeout=60.0)])

        async def measure(quick: Any, stuck: Any) -> tuple[float, float]:
            alone = -time.monotonic()
            assert await pull(quick) > PULL_MIB * MIB
            alone += time.monotonic()
            before = 0
            async with aclosing(stuck.download("Shard.Pull", request, timeout=120.0)) as slow:
                await anext(slow)  # the head of the answer, and nothing more
                beside = -time.monotonic()
                for index in range(9):
                    if index == 3:  # by now every version that may be kept is kept
                        gc.collect()
                        before = resident_bytes()
                    frames = raw.contribution(AsyncName(0, index), raw.one_hot(0, index), single=True)
                    assert (await raw.upload(frames)).version == index + 1
                    assert await pull(quick) > PULL_MIB * MIB
                beside += time.monotonic()
                gc.collect()
                grown = resident_bytes() - before
            print(
                f"H04: {grown / MIB:.0f} MiB more after six versions of {PULL_MIB} MiB beside one that nobody reads; "
                f"a pull takes {alone:.2f} s alone, {beside / 9:.2f} s with a push beside it"
            )
            assert grown < (2 * PULL_MIB + 128) * MIB
            kept = versions_alive() - others
            assert kept <= KEPT_VERSIONS + 1, "those of the state machine, and the one that is read from"
            return alone, beside / 9

        async def go() -> tuple[float, float]:
            server = await grpc.serve([("Shard", service)])
            stuck, quick = grpc.connect(server.address), grpc.connect(server.address)
            try:
                return await measure(quick, stuck)
            finally:
                await asyncio.gather(stuck.close(), quick.close())
                await server.stop()

        alone, beside = cluster.job.background.run(go(), 110.0)
        assert beside < 10 * alone + 5.0
        client.close()
    assert not caplog.records, "that it goes away in the end is nothing to talk about"
