"""What the parts of a job use of it: each names no more than it needs, and never `Job` itself, which has all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from paramserver.coordinator.options import JobOptions
from paramserver.core.job.membership import Membership
from paramserver.core.versions.consistency import Consistency
from paramserver.v1 import shard_pb2, types_pb2

T = TypeVar("T")


class Background(Protocol):
    """Tasks that go on beside the calls of members."""

    def loosely(self, work: Coroutine[Any, Any, T], awaited: bool = False) -> asyncio.Task[T]:
        """Begin a task that ends with the coordinator."""


class Stage(Protocol):
    """Where the job stands, and who is a member."""

    options: JobOptions
    state: types_pb2.JobState
    timeline: int
    consistency: Consistency
    members: Membership


class Commands(Protocol):
    """Commands to all servers, and the numbers that each command carries."""

    options: JobOptions
    timeline: int
    term: int

    async def ask_servers(self, method: str, request: Message) -> list[Message]:
        """Send all servers the same request; the first error is raised after all calls have ended."""

    async def server_stats(self) -> list[shard_pb2.StatsResponse]:
        """Ask all servers how they stand."""
