"""The common state of all shards of one server process: its job, its coordinator's term, the thread for arithmetic."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from paramserver import errors
from paramserver.membership.pulse import Pulse
from paramserver.server.team import Team
from paramserver.tracing import Recorder
from paramserver.transport.base import Channel, Method
from paramserver.transport.security.access import SECRET_BYTES, proof_of
from paramserver.transport.security.members import Known, ServerRoll, judge
from paramserver.transport.security.policy import SERVER, WORKER
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import record_age

T = TypeVar("T")
_Command = (
    shard_pb2.ConfigureRequest
    | shard_pb2.ActivateRequest
    | shard_pb2.SetHoldersRequest
    | shard_pb2.SetMembersRequest
    | shard_pb2.SetConsistencyRequest
    | shard_pb2.CutRequest
    | shard_pb2.ReleaseRequest
)


def _known(member: coordinator_pb2.MemberRecord) -> Known:
    return Known(SERVER if member.role == types_pb2.ROLE_SERVER else WORKER, member.proof)


class Process:
    """One server process. Lives in one event loop; :meth:`close` ends its threads.

    ``connect`` opens a channel to another server; ``wait_timeout_s`` bounds the wait for it. ``threads``: how many work
    on chunks side by side. ``shares``: memory is shared with backups on this host.
    """

    def __init__(
        self, job: str, connect: Callable[[str], Channel], wait_timeout_s: float, threads: int, shares: bool
    ) -> None:
        self.job, self.shares = job, shares
        self.connect, self.wait_timeout_s = connect, wait_timeout_s
        # What this server does, while a trace is wanted.
        self.trace = Recorder()
        # The reason why the server has ended; empty while it runs.
        self.failure: str = ""
        # The thread in which tensors are computed, and the threads that help it.
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="arithmetic")
        self.team = Team(threads)
        # The highest term of a coordinator so far; one of a lower term has been replaced.
        self.term = 0
        # The newest record of the job that a coordinator has told.
        self.record = coordinator_pb2.JobRecord()
        # Notices when this process does not run; made by the thread in which its loop runs.
        self.pulse = Pulse()
        # What the coordinator shows in its calls to this server; and the members, by the newest record.
        self.key = secrets.token_bytes(SECRET_BYTES)
        self._roll = ServerRoll(proof_of(self.key))
        # A number that this process chose when it became a member.
        self.incarnation = 0
        # Called when a report should not wait for the next regular one.
        self.news: Callable[[], None] = lambda: None
        self._at_the_end: list[Callable[[], None]] = []
        # The newest plan of which this process knows that it is in force or was given up; see `core.layout.replanning`.
        self.settled = 0
        # Drops the shards of former plans; gets the number of the plan in force.
        self.drops: Callable[[int], Awaitable[None]] | None = None
        # Offers a bulk connection to the present caller; None: this server has none.
        self.offer: Callable[[], shard_pb2.OpenBulkResponse] | None = None

    def becomes_member(self, incarnation: int, news: Callable[[], None]) -> None:
        """``incarnation`` goes into reports; ``news`` is called when a report should not wait for the regular one."""
        self.incarnation, self.news = incarnation, news

    def at_the_end(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the process has failed or stops."""
        self._at_the_end.append(end)

    def forget(self, end: Callable[[], None]) -> None:
        """``end`` need not be called any more."""
        self._at_the_end = [other for other in self._at_the_end if other != end]

    def in_force(self, plan: int) -> None:
        """A shard of this plan is configured, which no former plan fills: the plan is in force."""
        self.settled = max(self.settled, plan)

    async def settle(self, plan: int, settled: int) -> None:
        """``plan`` is in force; shards of other plans up to ``settled`` are dropped. Older news changes nothing."""
        if settled < self.settled:
            return
        self.settled = settled
        if self.drops is not None:
            await self.drops(plan)

    def fail(self, reason: str) -> None:
        """End the server: all calls that wait, or come from now on, are told why."""
        self.failure = self.failure or reason
        for end in self._at_the_end:
            end()

    def close(self) -> None:
        """End the threads. All shards are closed."""
        self.pool.shutdown(wait=True)
        self.team.close()

    async def arithmetic(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread for arithmetic."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def open_bulk(self, request: shard_pb2.OpenBulkRequest) -> shard_pb2.OpenBulkResponse:
        """A connection for frames beside gRPC."""
        if self.offer is None:
            return shard_pb2.OpenBulkResponse(reason="cluster.transport is grpc at the server")
        return self.offer()

    def check_authority(self, request: _Command) -> None:
        """Raise FencedError if a coordinator that has been replaced sends this command."""
        self.check_job(request.job)
        if request.term < self.term:
            raise errors.FencedError(
                f"this coordinator (term {request.term}) has been replaced: server follows term {self.term}"
            )
        self.term = request.term

    def check_meant(self, request: shard_pb2.ConfigureRequest) -> None:
        """Raise UnavailableError if a shard is given to another process, which was at this address before.

        This process is no member yet. With a shard it would be taken for a server of an earlier run when it joins.
        """
        if request.incarnation and self.incarnation and request.incarnation != self.incarnation:
            raise errors.UnavailableError("another process was at this address, and this one has not joined yet")

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
            self._roll = ServerRoll(proof_of(self.key), {one.member: _known(one) for one in told.members})

    def judge(self, method: Method, message: Message) -> None:
        """Raise an error if the caller of the present call may not say this; see `transport.security.members`."""
        judge(method, message, self._roll)

    def check_job(self, job: str) -> None:
        """Raise FencedError for a message to another job."""
        if job != self.job:
            raise errors.FencedError(f"this server belongs to job {self.job!r}, the message to {job[:100]!r}")
