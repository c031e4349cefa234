"""A job that nobody has joined yet, and requests to join it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership.joining import versions
from paramserver.store.memory import MemoryStore
from paramserver.transport.memory import MemoryNetwork
from paramserver.v1 import coordinator_pb2
from paramserver.wire.messages import PROTOCOL

SYNC, ASYNC = Consistency(Mode.SYNC), Consistency(Mode.ASYNC, 3)


def with_job(work: Callable[[CoordinatorService], Awaitable[Any]], **options: Any) -> Any:
    """Do something with a job of two servers and two workers that nobody has joined yet."""

    async def go() -> Any:
        given = {"consistency": SYNC, "seed": 7, **options}
        journal = Journal(MemoryStore(), "memory")
        return await work(CoordinatorService(JobOptions("test", 2, 2, **given), MemoryNetwork().connect, journal))

    return asyncio.run(go())


def request(**given: Any) -> coordinator_pb2.JoinRequest:
    return coordinator_pb2.JoinRequest(**{"protocol": PROTOCOL, "versions": versions(), **given})
