"""A whole job in one process, for scripts without a configured cluster and for tests.

The same coordinator, shards and workers as on a cluster, joined by the memory transport in one event loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from paramserver.config import Run
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.versions.consistency import Consistency
from paramserver.membership.joining import JoinOptions
from paramserver.records.opening import open_records
from paramserver.records.trackers import RunFacts
from paramserver.records.writing import Writing
from paramserver.server.member import ServerMember
from paramserver.server.service import ServerService
from paramserver.store.memory import MemoryStore
from paramserver.transport.memory import MemoryNetwork
from paramserver.v1 import types_pb2
from paramserver.worker.background import Background
from paramserver.worker.engine import Connect, Engine

COORDINATOR = "coordinator"
_SETTLE_S = 30.0


class InProcessJob:
    """Coordinator and servers in the event loop of ``background``; workers are made by :meth:`worker`.

    ``beside_workers``: how many of the servers, the last ones, say that they are beside workers.
    """

    def __init__(self, options: JobOptions, background: Background | None = None, beside_workers: int = 0) -> None:
        self.options = options
        self._beside_workers = beside_workers
        self.network = MemoryNetwork()
        self.background = background or Background()
        self.coordinator: CoordinatorService
        self.servers: list[ServerMember] = []
        self._writing: Writing | None = None

    def start(self) -> None:
        """Start coordinator and servers."""
        self.background.run(self._start())

    async def _start(self) -> None:
        journal = await Journal.open(MemoryStore(), "memory")
        self.coordinator = CoordinatorService(self.options, self.network.connect, journal)
        self.coordinator.job.address = COORDINATOR
        self.network.serve(COORDINATOR, [("Coordinator", self.coordinator)])
        await self.coordinator.start()
        for index in range(self.options.servers):
            address = f"server-{index}"
            service = ServerService(self.options.job, self.network.connect)
            self.network.serve(address, [("Shard", service)])
            beside = index >= self.options.servers - self._beside_workers
            server = ServerMember(service, self.network.connect(COORDINATOR), address, index, beside_worker=beside)
            await server.join()
            self.servers.append(server)

    def record(self, run: Run, settings: Mapping[str, str]) -> None:
        """Write the values of ``ctx.log`` where these settings say."""
        job = self.coordinator.job

        def missed(sentence: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.background.loop.call_soon_threadsafe(job.promises.broken.setdefault, "records", sentence)

        facts = RunFacts(self.options.job, f"{job.beginning:x}", settings)
        self._writing, _ = open_records(run, self.options.job, job.beginning, False, facts, missed)
        job.records.sink = self._writing

    def worker(
        self,
        index: int | None = None,
        connect: Connect | None = None,
        wait_timeout_s: float = 600.0,
        transport: str = "grpc",
        host_secret: str | None = None,
    ) -> Engine:
        """A worker that has joined. ``connect`` replaces the way it reaches others (to inject faults)."""
        connect = connect or self.network.connect
        engine = Engine(
            self.background,
            connect,
            connect(COORDINATOR),
            worker_options(self.options.consistency, self.options, index),
            wait_timeout_s,
            transport,
            host_secret,
        )
        engine.join()
        return engine

    def settle(self) -> None:
        """The workers have left: wait until all their contributions are accounted for."""
        coordinator = self.coordinator
        self.background.run(coordinator.job.changes.wait_until(lambda: not coordinator.job.ending.closing, _SETTLE_S))

    def close(self) -> None:
        """Stop servers and coordinator, then the loop."""
        self.background.run(self._close(), 30.0)
        if self._writing is not None:
            self._writing.close()
        self.background.close()

    async def _close(self) -> None:
        for server in self.servers:
            await server.close()
        await self.coordinator.close()
        for index in range(len(self.servers)):
            self.network.kill(f"server-{index}")
        self.network.kill(COORDINATOR)


def worker_options(consistency: Consistency, options: JobOptions, index: int | None) -> JoinOptions:
    """The facts that a worker of this job sends when it joins."""
    return JoinOptions(
        role=types_pb2.ROLE_WORKER,
        job=options.job,
        consistency=consistency,
        slices_per_step=options.slices_per_step,
        seed=options.seed,
        index=index,
        pid=os.getpid(),
    )
