"""Ranks and servers in one process: each rank is a thread, and the network is in memory."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from paramserver.distributed.group import ProcessGroup
from paramserver.distributed.rank import Rank
from paramserver.distributed.servers import Network, Servers
from paramserver.server.service import ServerService
from paramserver.transport.memory import MemoryNetwork
from paramserver.worker.background import Background

T = TypeVar("T")
JOB = "ranks"


class Here:
    """``size`` ranks and ``servers`` servers. Each rank has one group of all ranks."""

    def __init__(self, size: int, servers: int = 2, timeout_s: float = 30.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.memory = MemoryNetwork()
        self.addresses = [f"server-{index}" for index in range(servers)]
        self.background = Background()
        self.services: list[ServerService] = []
        for address in self.addresses:
            self.background.run(self._serve(address))
        self._pool = concurrent.futures.ThreadPoolExecutor(size)
        self._store = HashStore()
        self.groups: list[ProcessGroup] = self.all(self._group)

    async def _serve(self, address: str) -> None:
        service = ServerService(JOB, self.memory.connect)
        self.services.append(service)
        self.memory.serve(address, [("Shard", service)])

    def begin_anew(self, index: int) -> None:
        """Another process takes the place of a server."""

        async def go() -> None:
            self.memory.kill(self.addresses[index])
            await self._serve(self.addresses[index])

        self.background.run(go())

    def _group(self, rank: int) -> ProcessGroup:
        async def find() -> Servers:
            return Servers(JOB, self.addresses)

        network = Network(self.background, self.memory.connect, find)
        return ProcessGroup(Rank(network, self._store, rank, self.size, self.timeout_s))

    def all(self, work: Callable[[int], T]) -> list[T]:
        """The results of ``work(rank)`` of all ranks, which run side by side."""
        works = [self._pool.submit(work, rank) for rank in range(self.size)]
        concurrent.futures.wait(works)
        return [one.result() for one in works]

    def errors(self, work: Callable[[int], Any]) -> list[str]:
        """The texts of the errors of ``work(rank)``; empty for those that have ended well."""

        def text(rank: int) -> str:
            try:
                work(rank)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return ""

        return self.all(text)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        async def close() -> None:
            for service in self.services:
                await service.close()

        self.background.run(close(), 10.0)
        self._pool.shutdown()
        self.background.close()
