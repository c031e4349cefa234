"""What all RPCs of a server share: the present shard, the threads, and checks of who may command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import DecodeError

from paramserver import errors
from paramserver.server.reporting import report
from paramserver.server.running import RunningShard
from paramserver.server.team import Team
from paramserver.server.versions.intake import Intake
from paramserver.transport.base import Channel
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
    """One server without its RPCs. Lives in one event loop; :meth:`close` ends its threads."""

    def __init__(
        self, job: str, connect: Callable[[str], Channel], wait_timeout_s: float = 600.0, threads: int = 1
    ) -> None:
        """``connect`` opens a channel to another server; ``wait_timeout_s`` bounds the wait for it.

        ``threads``: how many work on chunks side by side.
        """
        self.job = job
        self.failure: str = ""
        # Set by whoever makes this process a member.
        self.incarnation = 0
        # Called when there is something to report that should not wait for the next regular report.
        self.news: Callable[[], None] = lambda: None
        # The highest term of a coordinator so far; one of a lower term has been replaced.
        self.term = 0
        # The newest record of the job that a coordinator has told.
        self.record = coordinator_pb2.JobRecord()
        self.intake = Intake()
        # When a worker was last heard of (monotonic seconds).
        self.used_at = time.monotonic()
        self._connect, self._wait_timeout_s = connect, wait_timeout_s
        self._shard: RunningShard | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="arithmetic")
        self._team = Team(threads)
        # A pull does not wait for the version that is being made.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._pushed = self._pulled = self._refused = 0
        self._encoding = asyncio.Lock()
        self._replacing = asyncio.Lock()

    def report(self) -> shard_pb2.StatsResponse:
        """What this server tells the coordinator every now and then."""
        response = report(self._shard)
        response.term, response.incarnation = self.term, self.incarnation
        response.refused += self._refused
        response.bytes_pushed, response.bytes_pulled = self._pushed, self._pulled
        return response

    @property
    def buffered(self) -> int:
        """Contributions that are kept because they are in no version yet."""
        return len(self._shard.buffers) if self._shard is not None else 0

    def holding(self) -> tuple[str, int]:
        """(layout, timeline) of the shard that this process holds; the layout is empty while it holds none."""
        return (self._shard.digest, self._shard.config.timeline) if self._shard is not None else ("", 0)

    def fail(self, reason: str) -> None:
        """End the server: whoever waits, or asks from now on, is told why."""
        self.failure = self.failure or reason
        if self._shard is not None:
            self._shard.end(errors.JobFailedError(self.failure))

    async def close(self) -> None:
        """Answer everybody and end the threads."""
        self.fail("the server stops")
        if self._shard is not None:
            await self._shard.close()
        self._pool.shutdown(wait=True)
        self._team.close()
        self._encoder.shutdown(wait=True)

    async def _arithmetic(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _check_authority(self, request: _Command) -> None:
        """A command must come from the coordinator that leads the job now."""
        self._check_job(request.job)
        if request.term < self.term:
            raise errors.FencedError(
                f"this coordinator (term {request.term}) has been replaced: server follows term {self.term}"
            )
        self.term = request.term

    def _keep(self, record: bytes) -> None:
        """Keep the coordinator's record for one that has lost its store. Raises ProtocolError if it is none."""
        if not record:
            return
        try:
            told = coordinator_pb2.JobRecord.FromString(record)
        except DecodeError as error:
            raise errors.ProtocolError("a record of the job that cannot be read") from error
        if record_age(told) > record_age(self.record):
            self.record = told

    def _check_job(self, job: str) -> None:
        if job != self.job:
            raise errors.FencedError(f"this server belongs to job {self.job!r}, the message to {job[:100]!r}")

    def _ready(self, active: bool = True) -> RunningShard:
        if self.failure:
            raise errors.JobFailedError(self.failure)
        if self._shard is None:
            raise errors.UnavailableError("this server has not been told its part of a model yet: try again")
        if active and not self._shard.state.active:
            raise errors.UnavailableError("version 0 is not published yet: try again")
        return self._shard

    def _on(self, timeline: int) -> RunningShard:
        shard = self._ready()
        if timeline != shard.config.timeline:
            raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}, not {timeline}")
        return shard
