"""A coordinator, a server and workers in one event loop over real sockets, each with a secret of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.leader import Leadership
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership.joining import JoinOptions
from paramserver.membership.session import Session
from paramserver.pki import certs
from paramserver.server.member import ServerMember
from paramserver.server.service import ServerService
from paramserver.store.memory import MemoryStore
from paramserver.transport import grpc
from paramserver.transport.base import Channel
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.contract.trust import ADMIN_TOKEN, JOIN, member, plain

JOB = "job"


def credentials(directory: Path | None) -> Callable[[str], Security]:
    """Makes the security of one more process of a role: with certificates in ``directory``, or with tokens alone."""
    if directory is not None:
        certs.init(directory)

    def make(role: str) -> Security:
        if directory is not None:
            return member(directory, "worker" if role in ("observer", "guest") else role)
        return plain([JOIN], [ADMIN_TOKEN] if role in ("coordinator", "admin") else [])

    return make


class Sockets:
    """The processes of a job. ``secure``: see :func:`credentials`."""

    def __init__(self, secure: Callable[[str], Security]) -> None:
        self.secure = secure
        self.addresses: dict[str, str] = {}
        self.coordinator: CoordinatorService
        self.server: ServerMember
        self.securities: dict[str, Security] = {}
        self.sessions: dict[str, Session] = {}
        self._channels: dict[tuple[str, str], Channel] = {}

    def channel(self, name: str, service: str) -> Channel:
        """The channel of a process ("worker", "server", …) to "Coordinator" or "Shard"."""
        if (name, service) not in self._channels:
            security = self.securities.setdefault(name, self.secure(name.partition("-")[0]))
            peer = "coordinator" if service == "Coordinator" else "server"
            self._channels[name, service] = grpc.connect(self.addresses[service], security, peer)
        return self._channels[name, service]

    async def join(self, name: str, role: types_pb2.Role = types_pb2.ROLE_WORKER) -> Session:
        """A process becomes a member."""
        options = JoinOptions(role=role, job=JOB, pid=1, join_timeout_s=20.0)
        session = Session(self.channel(name, "Coordinator"), options, coordinator_pb2.SessionRequest)
        await session.join()
        self.sessions[name] = session
        return session

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def sockets(secure: Callable[[str], Security]) -> AsyncIterator[Sockets]:
    """A job with a server and the members "worker", "worker-2" and "observer"; "worker-gone" has left.

    The server holds a model of one number.
    """
    one = Sockets(secure)
    async with AsyncExitStack() as stack:
        leads, serves = secure("coordinator"), secure("server")
        one.securities.update(coordinator=leads, server=serves)

        def to_servers(address: str) -> Channel:
            return grpc.connect(address, leads, "server")

        store = MemoryStore()
        leadership = Leadership(store, "here", 60.0)
        await leadership.acquire()
        journal = await Journal.open(store, "memory", leadership.term)
        options = JobOptions(JOB, 1, 2, Consistency(Mode.SYNC, None), 2)
        one.coordinator = CoordinatorService(options, to_servers, journal)
        one.coordinator.job.outranked = leadership.outranked
        await one.coordinator.start()
        stack.push_async_callback(one.coordinator.close)
        port = await grpc.serve([("Coordinator", one.coordinator)], security=leads)
        stack.push_async_callback(port.stop)
        one.addresses["Coordinator"] = port.address
        stack.push_async_callback(one.close)

        service = ServerService(JOB, lambda address: grpc.connect(address, serves, "server"))
        shard = await grpc.serve([("Shard", service)], security=serves)
        stack.push_async_callback(shard.stop)
        one.addresses["Shard"] = shard.address
        one.server = ServerMember(service, one.channel("server", "Coordinator"), shard.address)
        await one.server.join()
        stack.push_async_callback(one.server.close)
        one.sessions["server"] = one.server.session

        for name in ("worker-gone", "worker", "worker-2"):
            await one.join(name)
        gone = one.sessions["worker-gone"]
        assert await gone.leave(10.0)
        await one.join("observer", types_pb2.ROLE_OBSERVER)
        model = types_pb2.ModelSpec(
            tensors=[types_pb2.TensorSpec(name="w", shape=[1], dtype="float32", kind=types_pb2.TENSOR_KIND_PARAMETER)],
            optimizer=types_pb2.OptimizerSpec(name="sum", groups=[types_pb2.GroupHypers()]),
        )
        request = coordinator_pb2.RegisterModelRequest(member=one.sessions["worker"].member, model=model)
        await one.channel("worker", "Coordinator").call("Coordinator.RegisterModel", request, timeout=20.0)
        await _initialise(one)
        stack.push_async_callback(lambda: asyncio.gather(*(one.sessions[n].leave(0.1) for n in ("worker", "worker-2"))))
        yield one


async def _initialise(one: Sockets) -> None:
    """The worker brings version 0."""
    session = one.sessions["worker"]
    async with asyncio.timeout(20.0):
        while session.view.initialiser != session.member:
            await session.changed(session.editions)
    header = shard_pb2.InitializeHeader(
        job=JOB, timeline=session.view.timeline, grant=session.view.grant, worker=session.member, chunks=1
    )
    frame = shard_pb2.Frame(header=shard_pb2.FrameHeader(initialize=header), data=bytes(64))
    frame.header.chunks.add(bytes=64, dtype=types_pb2.DTYPE_FLOAT32)
    await one.channel("worker", "Shard").upload("Shard.Initialize", [frame.SerializeToString()], timeout=20.0)
    done = coordinator_pb2.InitializeDoneRequest(member=session.member, grant=session.view.grant)
    await one.channel("worker", "Coordinator").call("Coordinator.InitializeDone", done, timeout=20.0)


def state(one: Sockets) -> tuple[bytes, bytes, list[bytes], bool]:
    """What must not change when a call is refused: the view, the record, the reports of the server, no end."""
    job = one.coordinator.job
    record = coordinator_pb2.JobRecord()
    record.CopyFrom(job.journal.record_now)
    record.ClearField("training_s")
    reports = one.server.service.reports()
    for report in reports:
        assert isinstance(report, shard_pb2.StatsResponse)
        for told_once in ("times", "open", "held", "refused"):
            report.ClearField(told_once)
    made = [report.SerializeToString(deterministic=True) for report in reports]
    return (
        job.view().SerializeToString(deterministic=True),
        record.SerializeToString(deterministic=True),
        made,
        job.over.done(),
    )
