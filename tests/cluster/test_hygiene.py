"""What the objects of a process leave behind when they are closed, or forgotten: no threads, no open files."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import paramserver as ps
from paramserver import logs
from paramserver.coordinator.endpoint import Endpoint
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.membership import Role
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership.joining import JoinOptions
from paramserver.membership.session import Session
from paramserver.store.memory import MemoryStore
from paramserver.transport import grpc
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.cluster.harness import until

# Members that come and go: in `make test`, and in `make test-soak`.
MEMBERS = int(os.environ.get("SOAK_MEMBERS", "80"))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_k06_the_threads_of_a_client_end_with_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARAMSERVER_CLUSTER__COORDINATOR", raising=False)
    before = threads()
    client = ps.Client()
    client.init({"total": np.zeros(3)})
    client.push({"total": np.ones(3)})
    assert threads() > before
    if end == "closed":
        client.close()
        client.close()  # twice is not once too often
        assert threads() <= before
    del client
    gc.collect()
    until("its threads are gone", lambda: threads() <= before, 10.0)


def test_k01_members_that_come_and_go_leave_no_files() -> None:
    """Files, threads and tasks of the process that holds both sides are as before."""
    logs.configure("error")

    async def one(address: str, number: int) -> None:
        def report() -> coordinator_pb2.SessionRequest:
            return coordinator_pb2.SessionRequest(worker=coordinator_pb2.WorkerReport(slices=1))

        channel = grpc.connect(address)
        session = Session(channel, JoinOptions(types_pb2.ROLE_WORKER, "test", pid=1000 + number), report)
        await session.join()
        await session.leave()
        await channel.close()

    async def go() -> None:
        journal = await Journal.open(MemoryStore(), "memory", 1)
        service = CoordinatorService(JobOptions("test", 1, 1, Consistency(Mode.SYNC)), grpc.connect, journal)
        await service.start()
        endpoint = Endpoint("test")
        endpoint.service = service
        server = await grpc.serve([("Coordinator", endpoint)])
        found: list[tuple[int, int, int]] = []
        for number in range(20 + MEMBERS):
            if number == 20:
                found.append(_residue())
            await one(server.address, number)
        async with asyncio.timeout(10.0):
            while service.job.members.of(Role.WORKER) or any(
                now > then for now, then in zip(_residue(), found[0], strict=True)
            ):
                await asyncio.sleep(0.05)
        assert service.job.members.generation >= 2 * MEMBERS
        # What is written down of them does not grow either, nor is any slice of theirs forgotten.
        assert len(service.job.reports.departed()) == 1
        assert sum(gone.slices for gone in service.job.reports.departed()) == 20 + MEMBERS
        print(f"files, threads, tasks: {found[0]} after 20, {_residue()} after {20 + MEMBERS} members")
        await server.stop()
        await service.close()

    asyncio.run(go())


def _residue() -> tuple[int, int, int]:
    """Open files, threads and tasks. A loop makes the few threads of its pool when work comes together."""
    gc.collect()
    own = [name for name in threads() if not name.startswith("asyncio_")]
    return len(list(Path("/proc/self/fd").iterdir())), len(own), len(asyncio.all_tasks())
