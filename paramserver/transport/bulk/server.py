"""The called side of the bulk transport: a second port, with the first one's rules.

A connection opens with a token that a call over gRPC has asked for. So its caller has passed all checks of gRPC, and
the connection has the roles of that call and the shard to which that call was addressed. With TLS, the certificate of
the connection must be of one of these roles. Each call is checked against the table of roles again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport import fork
from paramserver.transport.addresses import probe
from paramserver.transport.base import (
    Caller,
    Method,
    MethodKind,
    addressed,
    answer,
    caller,
    handlers,
    reply,
    set_addressed,
    set_caller,
    whole,
)
from paramserver.transport.bulk.line import Line, LostError
from paramserver.transport.bulk.records import Kind, Record, of_error, of_frame
from paramserver.transport.bulk.sockets import Moving
from paramserver.transport.bulk.tls import Contexts, greet, shown
from paramserver.transport.entrance import End, Entrance
from paramserver.transport.failures import answered
from paramserver.transport.limits import LIMITS, Limits
from paramserver.transport.security.access import OPEN, Security
from paramserver.transport.security.policy import CALLERS
from paramserver.v1 import shard_pb2

# A token opens a connection within this time.
TOKEN_S = 20.0
_TOKENS = 8192
# How long the rest of an upload is read and thrown away whose answer has gone out.
_REST_S = 5.0


@dataclass(frozen=True, slots=True)
class _Ticket:
    """The call that a token allows. ``until``: seconds of the monotonic clock."""

    caller: Caller
    shard: int | None
    until: float


class BulkServer:
    """Answers uploads and downloads of one process. Made by `serve`."""

    def __init__(self, services: Sequence[tuple[str, object]], security: Security, limits: Limits) -> None:
        self.port = 0
        # Connections whose token was right.
        self.connections = 0
        self._handlers = {
            method.name: (method, handler) for method, handler in handlers(services) if method.kind in _ANSWERS
        }
        self._security, self._limits = security, limits
        self._contexts = Contexts(security.certificates, called=True)
        self._tickets: dict[bytes, _Ticket] = {}
        self._entrance = Entrance("bulk connection", self._take)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []
        fork.keep(self)

    def offer(self) -> shard_pb2.OpenBulkResponse:
        """A port and a token, for the caller of the present call. Raises OverloadedError if too many are given out."""
        who = caller()
        assert who is not None, "a connection is offered in answer to a call"
        now = time.monotonic()
        if len(self._tickets) >= _TOKENS:
            self._tickets = {key: ticket for key, ticket in self._tickets.items() if ticket.until > now}
        if len(self._tickets) >= _TOKENS or self.connections >= self._limits.connections:
            raise errors.OverloadedError("this server has too many bulk connections already: try again soon")
        token = secrets.token_bytes(32)
        self._tickets[_key(token)] = _Ticket(who, addressed(), now + TOKEN_S)
        return shard_pb2.OpenBulkResponse(port=self.port, token=token)

    async def listen(self, host: str, port: int) -> None:
        """See `serve`."""
        await probe(host, port)
        await self._security.check_listen(host)
        loop = asyncio.get_running_loop()
        for family, kind, protocol, _, where in await loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            self._listening.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((where[0], self.port or port, *where[2:]))
            except OSError as error:
                self._close_ports()
                raise errors.ConfigError(
                    f"cannot listen on port {port} of {host} for bulk connections ({error.strerror}): choose another"
                ) from error
            sock.setblocking(False)
            sock.listen(256)
            self.port = sock.getsockname()[1]
        for sock in self._listening:
            self._entrance.open(sock)

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more connections, give calls in flight ``grace`` seconds, then cancel them and wait for their end."""
        fork.check()
        self._close_ports()
        if self._tasks and grace > 0:
            await asyncio.wait(self._tasks, timeout=grace)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _close_ports(self) -> None:
        self._entrance.close()
        listening, self._listening = self._listening, []
        for sock in listening:
            sock.close()

    def _take(self, sock: socket.socket, peer: str, number: int) -> End:
        task = asyncio.get_running_loop().create_task(self._serve(sock, peer, number))
        self._tasks.add(task)

        def ended(_: object) -> None:
            self._tasks.discard(task)
            self._entrance.settled(number)
            sock.close()  # of a task that was cancelled before it began

        task.add_done_callback(ended)
        return task.cancel

    async def _serve(self, sock: socket.socket, peer: str, number: int) -> None:
        """One connection, from its beginning to its end."""
        try:
            async with asyncio.timeout(self._limits.handshake_s):
                moving, role = await greet(sock, self._contexts.current()[1])
                ticket = await self._shown(moving, role)
        except (OSError, TimeoutError, errors.ParamServerError, ssl.SSLError) as error:
            self._entrance.refuse(peer, str(error) or "no token came in time")
            return
        self._entrance.settled(number)
        line = Line(moving)
        self.connections += 1
        try:
            while True:
                await self._answer(line, ticket, await line.receive())
        except LostError:
            return
        except errors.ProtocolError as error:
            self._entrance.refuse(peer, str(error))
        finally:
            self.connections -= 1
            line.close("this server has closed the connection")
            await line.released()

    async def _shown(self, moving: Moving, role: str) -> _Ticket:
        """The ticket of a new connection, which is closed if this raises. Nothing but a token is received before."""
        try:
            return self._ticket(await shown(moving), role)
        except BaseException:
            moving.hang_up()
            moving.close()
            raise

    def _ticket(self, token: bytes, role: str) -> _Ticket:
        """The ticket of a token. Raises DeniedError."""
        ticket = self._tickets.pop(_key(token), None)
        if ticket is None or ticket.until < time.monotonic():
            raise errors.DeniedError("a wrong token, or an old one")
        if self._security.tls and role not in ticket.caller.roles:
            raise errors.DeniedError(f"the certificate is of the role {role!r}, the token was for another one")
        return ticket

    # ---- calls

    async def _answer(self, line: Line, ticket: _Ticket, call: Record) -> None:
        if call.kind is not Kind.CALL:
            raise errors.ProtocolError(f"a record of kind {call.kind.name} came where a call begins")
        task = asyncio.get_running_loop().create_task(self._run(line, ticket, call))
        gone = asyncio.get_running_loop().create_task(line.ended())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        with suppress(asyncio.CancelledError):
            task.result()

    async def _run(self, line: Line, ticket: _Ticket, call: Record) -> None:
        set_caller(ticket.caller)
        set_addressed(ticket.shard)
        name = call.header.decode("ascii", "replace")
        frames = _Incoming(line, name)
        try:
            method, handler = self._find(name, ticket.caller)
            await answered(name, lambda: _ANSWERS[method.kind](line, method, handler, call, frames))
        except LostError:
            raise
        except errors.ParamServerError as error:
            await line.send(of_error(type(error).__name__, str(error)))
        await frames.rest(self._handlers.get(name))

    def _find(self, name: str, who: Caller) -> tuple[Method, Any]:
        if name not in self._handlers:
            raise errors.VersionMismatchError  # the caller has the words for it
        if not CALLERS[name] & who.roles:
            raise errors.DeniedError(f"{name}: permission denied")
        return self._handlers[name]


class _Incoming:
    """The frames of one upload."""

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name
        self._ended = False

    async def each(self) -> AsyncIterator[AnyFrame]:
        """The frames until the sender has ended the upload."""
        while not self._ended:
            try:
                record = await self._line.receive()
            except LostError as error:
                raise errors.UnavailableError(
                    f"{self._name}: the sender went away in the middle of the stream ({error})"
                ) from None
            if record.kind is Kind.END:
                self._ended = True
                return
            yield record.frame()

    async def rest(self, found: tuple[Method, Any] | None) -> None:
        """Throw away what still comes of an upload that was answered before its end."""
        if found is None or found[0].kind is not MethodKind.UPLOAD or self._ended:
            return
        with suppress(TimeoutError, errors.ParamServerError):
            async with asyncio.timeout(_REST_S):
                async for _ in self.each():
                    pass
                return
        self._line.close("the rest of an upload did not come")


async def _upload(line: Line, method: Method, handler: Any, call: Record, frames: _Incoming) -> None:
    raw = await reply(method, handler, frames.each())
    await line.send(Record(Kind.REPLY, pieces=(memoryview(raw),)))


async def _download(line: Line, method: Method, handler: Any, call: Record, frames: _Incoming) -> None:
    async def send(frame: AnyFrame) -> None:
        await line.send(of_frame(frame))

    await answer(method, handler, call.data(), send, whole)
    await line.send(Record(Kind.END))


_ANSWERS = {MethodKind.UPLOAD: _upload, MethodKind.DOWNLOAD: _download}


def _key(token: bytes) -> bytes:
    """Tokens are kept as digests, so that comparing them tells nothing."""
    return hashlib.sha256(token).digest()


async def serve(
    services: Sequence[tuple[str, object]],
    host: str = "127.0.0.1",
    port: int = 0,
    security: Security = OPEN,
    limits: Limits = LIMITS,
) -> BulkServer:
    """Take bulk connections on ``host`` and ``port`` (0: any). Raises ConfigError as `grpc.serve` does."""
    fork.check()
    server = BulkServer(services, security, limits)
    await server.listen(host, port)
    return server
