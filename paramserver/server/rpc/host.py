"""The common state of a server's parts: the present shard, the thread for arithmetic, and checks of commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import DecodeError

from paramserver import errors
from paramserver.server.running import RunningShard
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import record_age

T = TypeVar("T")
_Command = (
    shard_pb2.ConfigureRequest
    | shard_pb2.ActivateRequest
    | shard_pb2.SetMembersRequest
    | shard_pb2.SetConsistencyRequest
    | shard_pb2.CutRequest
    | shard_pb2.ReleaseRequest
)


class Host:
    """One server without its RPCs. Lives in one event loop; :meth:`close` ends its thread."""

    def __init__(self, job: str) -> None:
        self.job = job
        # The reason why the server has ended; empty while it runs.
        self.failure: str = ""
        # The shard of the present timeline; None until the coordinator has configured one.
        self.shard: RunningShard | None = None
        # The thread in which tensors are computed.
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="arithmetic")
        # The highest term of a coordinator so far; one of a lower term has been replaced.
        self.term = 0
        # The newest record of the job that a coordinator has told.
        self.record = coordinator_pb2.JobRecord()

    async def replace(self, made: RunningShard) -> None:
        """Serve another shard from now on; the former one ends."""
        former, self.shard = self.shard, made
        if former is not None:
            former.end(errors.RolledBackError(f"this server is on timeline {made.config.timeline} now"))
            await former.close()

    def fail(self, reason: str) -> None:
        """End the server: all calls that wait, or come from now on, are told why."""
        self.failure = self.failure or reason
        if self.shard is not None:
            self.shard.end(errors.JobFailedError(self.failure))

    async def close(self) -> None:
        """Answer everybody and end the thread."""
        self.fail("the server stops")
        if self.shard is not None:
            await self.shard.close()
        self.pool.shutdown(wait=True)

    async def arithmetic(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread for arithmetic."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def check_authority(self, request: _Command) -> None:
        """Raise FencedError if a coordinator that has been replaced sends this command."""
        self.check_job(request.job)
        if request.term < self.term:
            raise errors.FencedError(
                f"this coordinator (term {request.term}) has been replaced: server follows term {self.term}"
            )
        self.term = request.term

    def keep(self, record: bytes) -> None:
        """Keep the record of the job for a coordinator that has lost its store. Raises ProtocolError if unreadable."""
        if not record:
            return
        try:
            told = coordinator_pb2.JobRecord.FromString(record)
        except DecodeError as error:
            raise errors.ProtocolError("a record of the job that cannot be read") from error
        if record_age(told) > record_age(self.record):
            self.record = told

    def check_job(self, job: str) -> None:
        """Raise FencedError for a message to another job."""
        if job != self.job:
            raise errors.FencedError(f"this server belongs to job {self.job!r}, the message to {job[:100]!r}")

    def ready(self, active: bool = True) -> RunningShard:
        """The present shard; ``active``: one that has published a version.

        Raises JobFailedError, and UnavailableError while there is no such shard.
        """
        if self.failure:
            raise errors.JobFailedError(self.failure)
        if self.shard is None:
            raise errors.UnavailableError("this server has not been told its part of a model yet: try again")
        if active and not self.shard.state.active:
            raise errors.UnavailableError("version 0 is not published yet: try again")
        return self.shard

    def on(self, timeline: int) -> RunningShard:
        """The present shard. Raises RolledBackError if it is on another timeline, and what :meth:`ready` raises."""
        shard = self.ready()
        if timeline != shard.config.timeline:
            raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}, not {timeline}")
        return shard
