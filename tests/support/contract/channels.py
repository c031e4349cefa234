"""The transports under test, and services to call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from paramserver import errors
from paramserver.transport import grpc as over_grpc
from paramserver.transport.addresses import split_shard
from paramserver.transport.base import Caller, Channel
from paramserver.transport.bulk import server as bulk_server
from paramserver.transport.bulk.channel import BulkChannel
from paramserver.transport.memory import MemoryNetwork
from paramserver.transport.security.policy import ROLES
from paramserver.transport.shm import channel as local
from paramserver.v1 import coordinator_pb2, shard_pb2

DEADLINE_S = 20.0


class Server(Protocol):
    """What both kinds of server have."""

    @property
    def address(self) -> str: ...

    async def stop(self, grace: float = 0.0) -> None: ...


class Wires:
    """One transport: how to serve and to connect. Everything opened here is closed by `close`."""

    kind: str

    def __init__(self) -> None:
        self.opened: list[Channel | Server] = []

    async def serve(self, *services: tuple[str, object], again: str = "") -> Server:
        """A server; at the address ``again`` if given."""
        server = await self._serve(services, again)
        self.opened.append(server)
        return server

    def connect(self, address: str) -> Channel:
        """A channel to it."""
        channel = self._connect(address)
        self.opened.append(channel)
        return channel

    async def pair(self, *services: tuple[str, object]) -> tuple[Server, Channel]:
        """A server and a channel to it."""
        server = await self.serve(*services)
        return server, self.connect(server.address)

    async def close(self) -> None:
        """Close all, latest first."""
        for thing in reversed(self.opened):
            await (thing.stop() if hasattr(thing, "stop") else thing.close())

    def nowhere(self) -> str:
        """An address where nobody answers."""
        raise NotImplementedError

    async def _serve(self, services: Sequence[tuple[str, object]], again: str) -> Server:
        raise NotImplementedError

    def _connect(self, address: str) -> Channel:
        raise NotImplementedError


class MemoryWires(Wires):
    """Within the event loop."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork()

    def nowhere(self) -> str:
        return "nowhere:1"

    async def _serve(self, services: Sequence[tuple[str, object]], again: str) -> Server:
        return self.network.serve(again or f"peer-{len(self.opened)}:1", services)

    def _connect(self, address: str) -> Channel:
        return self.network.connect(address)


class GrpcWires(Wires):
    """Real sockets on 127.0.0.1."""

    kind = "grpc"

    def nowhere(self) -> str:
        return "127.0.0.1:1"

    async def _serve(self, services: Sequence[tuple[str, object]], again: str) -> Server:
        return await over_grpc.serve(services, "127.0.0.1", int(again.rpartition(":")[2] or 0))

    def _connect(self, address: str) -> Channel:
        return over_grpc.connect(address)


class LocalWires(MemoryWires):
    """A socket between two processes of one host; where it is gone, within the event loop."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self._services: dict[str, Sequence[tuple[str, object]]] = {}
        self._served: dict[str, list[asyncio.Task[local.LocalServer]]] = {}

    async def _serve(self, services: Sequence[tuple[str, object]], again: str) -> Server:
        server = await super()._serve(services, again)
        self._services[server.address] = services
        return _Both(server, self._served.setdefault(server.address, []))

    def _connect(self, address: str) -> Channel:
        main = super()._connect(address)
        self.opened.append(main)
        place, shard = split_shard(address)
        if place not in self._services:
            return main
        mine, theirs = socket.socketpair()
        anybody = Caller(ROLES, admin=True)
        self._served[place].append(spawn(local.serve(theirs, self._services[place], anybody, shard)))
        return _Whole(main, mine)


class _Whole:
    """Unary calls over a socket; streams go over the main channel, which ends with this one."""

    def __init__(self, main: Channel, sock: socket.socket) -> None:
        self.kind, self.address, self.beside = main.kind, main.address, main.beside
        self.upload, self.download, self.session = main.upload, main.download, main.session
        self._main, self._local = main, main.beside(sock)
        self.call = self._local.call

    async def close(self) -> None:
        await self._local.close()
        await self._main.close()


class _Both:
    """A server that is reached both ways."""

    def __init__(self, main: Server, served: list[asyncio.Task[local.LocalServer]]) -> None:
        self.address = main.address
        self._main, self._served = main, served

    async def stop(self, grace: float = 0.0) -> None:
        while self._served:
            await (await self._served.pop()).stop(grace)
        await self._main.stop(grace)


class BulkWires(GrpcWires):
    """Sockets beside gRPC, on 127.0.0.1."""

    kind = "bulk"

    async def _serve(self, services: Sequence[tuple[str, object]], again: str) -> Server:
        if not any(name == "Shard" for name, _ in services):
            return await super()._serve(services, again)
        sockets = await bulk_server.serve(services)
        offering = [(name, Offering(thing, sockets) if name == "Shard" else thing) for name, thing in services]
        return _Stopping(await super()._serve(offering, again), sockets)

    def _connect(self, address: str) -> Channel:
        return BulkChannel(super()._connect(address))


class Offering:
    """A service of shards that offers bulk connections."""

    def __init__(self, service: object, sockets: bulk_server.BulkServer) -> None:
        self._service, self._sockets = service, sockets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def open_bulk(self, request: shard_pb2.OpenBulkRequest) -> shard_pb2.OpenBulkResponse:
        return self._sockets.offer()


class _Stopping:
    """A server with bulk connections."""

    def __init__(self, main: Server, sockets: bulk_server.BulkServer) -> None:
        self.address = main.address
        self._main, self._sockets = main, sockets

    async def stop(self, grace: float = 0.0) -> None:
        await asyncio.gather(self._sockets.stop(grace), self._main.stop(grace))


WIRES: tuple[type[Wires], ...] = (MemoryWires, GrpcWires, LocalWires, BulkWires)


def run(wires: type[Wires], test: Callable[[Any], Awaitable[None]]) -> None:
    """Run ``test`` in a fresh event loop, with a deadline; afterwards no task of ours is left."""

    async def main() -> None:
        mine = wires()
        before = asyncio.all_tasks()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(mine)
        finally:
            await mine.close()
        left = {task for task in asyncio.all_tasks() - before if "transport" in repr(task.get_coro())}
        if left:
            await asyncio.wait(left, timeout=DEADLINE_S)
        assert not [task for task in left if not task.done()]

    asyncio.run(main())


class Stub:
    """A service whose methods a test sets; the others must not be called."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def uncalled(_: object) -> None:
            raise AssertionError(f"{name} was called")

        return self._methods.get(name, uncalled)


async def echo(request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
    """A unary method that answers at once."""
    return coordinator_pb2.StatusResponse(job="model" if request.model else "")


class Parked:
    """Counts handlers that wait for ever, and tells when they have come and gone."""

    def __init__(self) -> None:
        self.arrived = 0
        self.left = 0
        self.ended: list[str] = []
        self._changed = asyncio.Condition()

    async def park(self) -> None:
        """What a handler does."""
        self.arrived += 1
        await self._notify()
        how = "returned"
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self.left += 1
            self.ended.append(how)
            notify = asyncio.get_running_loop().create_task(self._notify())
            del notify

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it; the test's deadline ends it otherwise."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def unary(self, _: object) -> coordinator_pb2.StatusResponse:
        """Parks."""
        await self.park()
        return coordinator_pb2.StatusResponse()

    async def upload(self, frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        """Parks before it reads."""
        await self.park()
        return shard_pb2.PushResponse()

    async def download(self, _: object) -> AsyncIterator[bytes]:
        """Sends one frame, then parks."""
        yield b"first"
        await self.park()

    async def session(self, requests: AsyncIterator[Any]) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        """Answers once, then parks."""
        yield coordinator_pb2.SessionResponse()
        await self.park()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task."""
    return asyncio.get_running_loop().create_task(work)


async def swallow(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
    """A service that refuses frames that do not begin as ours do."""
    async for frame in frames:
        raise errors.ProtocolError(f"{len(frame)} bytes that begin with {frame[:2].hex()}")
    return shard_pb2.PushResponse()
