"""The transport within one event loop: for tests, and for a cluster in one process.

Messages are encoded and parsed and pass through bounded queues. Services run in tasks of their own. Errors travel by
name and text. So code that works here works over gRPC.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport.addresses import split_shard
from paramserver.transport.base import (
    Caller,
    Frames,
    Method,
    MethodKind,
    Place,
    answer,
    each,
    failure,
    find,
    frame,
    handlers,
    reply,
    set_addressed,
    set_caller,
)
from paramserver.transport.failures import answered, in_time, unavailable, unknown_call
from paramserver.transport.security.policy import ROLES
from paramserver.transport.shm.channel import LocalChannel

T = TypeVar("T")
T2 = TypeVar("T2")

# Messages on their way, in one direction of one call.
_ROOM = 2
# Within one process every caller is trusted.
_ANYONE = Caller(ROLES, admin=True)


class MemoryNetwork:
    """Addresses are any strings. A killed or stopped address may be served again; channels then find the new server."""

    def __init__(self) -> None:
        self._servers: dict[str, MemoryServer] = {}

    def serve(self, address: str, services: Sequence[tuple[str, object]]) -> MemoryServer:
        """Answer calls to ``address`` from now on. Raises ConfigError if another server does already."""
        if address in self._servers:
            raise errors.ConfigError(f"{address} is in use; stop the server there, or choose another address")
        server = MemoryServer(address, services, self._forget)
        self._servers[address] = server
        return server

    def connect(self, address: str) -> MemoryChannel:
        """A channel to ``address``. Each call finds out whether a server answers there."""
        return MemoryChannel(self, address)

    def kill(self, address: str) -> None:
        """Like SIGKILL on the process there: calls in flight and later ones fail with UnavailableError."""
        server = self._servers.get(address)
        if server is not None:
            server.abort()

    def at(self, address: str) -> MemoryServer | None:
        """The server that answers there now; None: there is none."""
        return self._servers.get(address)

    def _forget(self, server: MemoryServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]


class MemoryServer:
    """Services at one address."""

    def __init__(
        self, address: str, services: Sequence[tuple[str, object]], forget: Callable[[MemoryServer], None]
    ) -> None:
        self.address = address
        self._handlers = {method.name: handler for method, handler in handlers(services)}
        self._forget = forget
        self._running: set[asyncio.Task[Any]] = set()

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more calls, give those in flight ``grace`` seconds, then cancel them and wait for their end."""
        self._forget(self)
        if self._running and grace > 0:
            await asyncio.wait(self._running, timeout=grace)
        running = self.abort()
        if running:
            await asyncio.wait(running)

    def abort(self) -> set[asyncio.Task[Any]]:
        """Cancel all calls; returns the tasks that have still to end."""
        self._forget(self)
        running = set(self._running)
        for task in running:
            task.cancel()
        return running

    def handler(self, method: Method) -> Any:
        """The service's method. Raises VersionMismatchError if no service here has it."""
        if method.name not in self._handlers:
            raise unknown_call(f"{method.name} at {self.address}")
        return self._handlers[method.name]

    def start(self, method: Method, work: Callable[[], Coroutine[Any, Any, T]], shard: int | None) -> asyncio.Task[T]:
        """Run a service's method, for a call to ``shard``; its errors become those that the caller is to see."""

        async def run() -> T:
            set_caller(_ANYONE)
            set_addressed(shard)
            return await answered(f"{method.name} at {self.address}", work)

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, whether or not the caller is still there


class MemoryChannel:
    """See `base.Channel`."""

    kind = "memory"

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self._server, self._shard = split_shard(address)
        self._network = network
        self._calls: set[_Call[Any]] = set()
        self._closed = False

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found, handler, server = self._find(method, MethodKind.UNARY)
        raw = found.encode_request(request)
        with self._begin(server, found, timeout, lambda: reply(found, handler, raw)) as call:
            return found.decode_response(await call.outcome())

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found, handler, server = self._find(method, MethodKind.UPLOAD)
        pipe: _Pipe[bytes] = _Pipe()
        with self._begin(server, found, timeout, lambda: reply(found, handler, pipe.read())) as call:
            call.task.add_done_callback(lambda _: pipe.abandon())
            async for raw in each(frames):
                if not await call.within(pipe.put(frame(found, raw))):
                    break
            pipe.finish()
            return found.decode_response(await call.outcome())

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """See `base.Channel`."""
        found, handler, server = self._find(method, MethodKind.DOWNLOAD)
        raw = found.encode_request(request)
        pipe: _Pipe[bytes] = _Pipe()
        with self._begin(server, found, timeout, lambda: answer(found, handler, raw, pipe.put, frame)) as call:
            call.task.add_done_callback(lambda _: pipe.finish())
            while (item := await call.within(pipe.take())) is not None:
                yield item
            await call.outcome()

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`."""
        found, handler, server = self._find(method, MethodKind.SESSION)
        up: _Pipe[bytes] = _Pipe()
        down: _Pipe[bytes] = _Pipe()

        async def send() -> None:
            async for request in requests:
                if not await up.put(found.encode_request(request)):
                    return
            up.finish()

        with self._begin(server, found, None, lambda: answer(found, handler, up.read(), down.put, frame)) as call:
            call.task.add_done_callback(lambda _: up.abandon())
            call.task.add_done_callback(lambda _: down.finish())
            sender = asyncio.get_running_loop().create_task(send())
            sender.add_done_callback(lambda sent: call.task.cancel() if failure(sent) else None)
            try:
                while (raw := await call.within(down.take())) is not None:
                    yield found.decode_response(raw)
                if (error := failure(sender)) is not None:
                    raise error
                await call.outcome()
            finally:
                sender.cancel()
                await asyncio.wait([sender])

    def beside(self, sock: socket.socket) -> LocalChannel:
        """See `base.Channel`."""
        return LocalChannel(self, sock)

    async def close(self) -> None:
        """See `base.Channel`."""
        self.break_off()

    def break_off(self) -> None:
        """Close the channel at once. At the peer every call in flight is cancelled, even if no task waits here."""
        self._closed = True
        for call in list(self._calls):
            call.hang_up()

    def _begin(
        self, server: MemoryServer, method: Method, timeout: float | None, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> _Call[T]:
        return _Call(self._calls, server, method, timeout, work, self._shard)

    def _find(self, name: str, kind: MethodKind) -> tuple[Method, Any, MemoryServer]:
        method = find(name, kind)
        where = f"{method.name} at {self.address}"
        if self._closed:
            raise unavailable(where, "this channel is closed")
        server = self._network.at(self._server)
        if server is None:
            raise unavailable(where, "connection refused")
        return method, server.handler(method), server


class _Call(Generic[T]):
    """One call in flight. Leaving the context cancels the service's task, without waiting: nor would a network."""

    def __init__(
        self,
        calls: set[_Call[Any]],
        server: MemoryServer,
        method: Method,
        timeout: float | None,
        work: Callable[[], Coroutine[Any, Any, T]],
        shard: int | None,
    ) -> None:
        self._calls = calls
        self._where = f"{method.name} at {server.address}"
        self._timeout = timeout or 0.0
        loop = asyncio.get_running_loop()
        self._deadline = None if timeout is None else loop.time() + timeout
        self._reason = "it stopped or closed the connection"
        self.task = server.start(method, work, shard)
        self._alarm = None if self._deadline is None else loop.call_at(self._deadline, self.task.cancel)

    def __enter__(self) -> _Call[T]:
        self._calls.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.discard(self)
        if self._alarm is not None:
            self._alarm.cancel()
        self.task.cancel()

    def hang_up(self) -> None:
        """The channel is closed."""
        self._reason = "this channel is closed"
        self.task.cancel()

    async def outcome(self) -> T:
        """The result of the service. Raises what the service raised, DeadlineError, or UnavailableError."""
        await self.within(asyncio.wait([self.task]))
        if self.task.cancelled():
            raise unavailable(self._where, self._reason)
        return self.task.result()

    async def within(self, wait: Awaitable[T2]) -> T2:
        """The result of ``wait``. Raises DeadlineError after the deadline of the call."""
        return await in_time(self._where, self._timeout, self._deadline, wait)


class _Pipe(Generic[T]):
    """A bounded queue with one writer and one reader, either of whom may go away."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._finished = False
        self._abandoned = False

    async def put(self, item: T) -> bool:
        """Waits for room; False if nobody reads any more."""
        while len(self._items) >= _ROOM and not self._abandoned:
            await self._change()
        if self._abandoned:
            return False
        self._items.append(item)
        self._changed.set()
        return True

    async def take(self) -> T | None:
        """The next item, or None after the last one."""
        while not self._items and not self._finished:
            await self._change()
        self._changed.set()
        return self._items.popleft() if self._items else None

    async def read(self) -> AsyncIterator[T]:
        """The items until the writer has finished."""
        while (item := await self.take()) is not None:
            yield item

    def finish(self) -> None:
        """Nothing more will be put."""
        self._finished = True
        self._changed.set()

    def abandon(self) -> None:
        """Nothing more will be taken."""
        self._abandoned = True
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
