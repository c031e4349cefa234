"""The calling side of the bulk transport."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar

import structlog
from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport import fork
from paramserver.transport.addresses import host_of, split_shard
from paramserver.transport.base import Channel, Frames, MethodKind, Place, each, failure, find, whole
from paramserver.transport.bulk.line import Line, LostError
from paramserver.transport.bulk.records import Kind, Record, of_frame
from paramserver.transport.bulk.tls import Contexts, greet
from paramserver.transport.failures import in_time, remote_error, unavailable, unknown_call
from paramserver.transport.security.access import OPEN, Security
from paramserver.transport.security.policy import SERVER
from paramserver.transport.security.tls import Identity
from paramserver.transport.shm.channel import LocalChannel
from paramserver.v1 import shard_pb2

T = TypeVar("T")

_CONNECT_S = 5.0
# After a failed connection, calls go over gRPC for so long.
_AGAIN_S = 30.0
_CLOSED = "this channel is closed"
_OPEN = "Shard.OpenBulk"

log = structlog.get_logger("paramserver.transport")


class BulkChannel:
    """See `base.Channel`. ``main`` leads to the same peer; closing this channel closes it.

    Unary calls and sessions go over ``main``. So do uploads and downloads if the peer offers no bulk connections, or
    if none can be opened.
    """

    def __init__(self, main: Channel, security: Security = OPEN, peer: str = SERVER) -> None:
        self.address = main.address
        # The reason why calls go over the main channel; empty: they do not.
        self.why_not = ""
        self._main = main
        self._host = host_of(split_shard(main.address)[0])
        self._peer = peer
        self._contexts = Contexts(security.certificates, called=False)
        self._idle: list[tuple[Line, Identity | None]] = []
        self._open: set[Line] = set()
        # When the next connection is tried, after one that failed.
        self._again_at = 0.0
        self._never = self._closed = False
        fork.keep(self)

    @property
    def kind(self) -> str:
        """See `base.Channel`."""
        return f"{self._main.kind}: {self.why_not}" if self.why_not else "bulk"

    async def attempt(self, timeout: float) -> str:
        """Open a connection if there is none. Returns the reason why calls go over the main channel; "": they do not.

        Raises what the call for a token raises.
        """
        call = await self._begin(_OPEN, timeout, asyncio.get_running_loop().time() + timeout)
        if call is not None:
            call.complete = True
            self.back(call)
        return self.why_not

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        return await self._main.call(method, request, timeout=timeout)

    def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`."""
        return self._main.session(method, requests)

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UPLOAD)
        deadline = asyncio.get_running_loop().time() + timeout
        call = await self._begin(method, timeout, deadline)
        if call is None:
            return await self._main.upload(method, frames, timeout=timeout)

        async def talk() -> Record:
            await call.line.send(Record(Kind.CALL, method.encode()))
            answer = asyncio.ensure_future(call.line.receive())
            try:
                async for raw in each(frames):
                    whole(found, raw)
                    if answer.done() or not await call.line.send(of_frame(raw)):
                        break
                else:
                    await call.line.send(Record(Kind.END))
                    record = await answer
                    call.complete = True
                    return record
                return await answer
            finally:
                answer.cancel()
                await asyncio.wait([answer])
                failure(answer)

        async with call:
            return found.decode_response(call.reply(await call.within(talk())))

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """See `base.Channel`."""
        found = find(method, MethodKind.DOWNLOAD)
        raw = found.encode_request(request)
        deadline = asyncio.get_running_loop().time() + timeout
        call = await self._begin(method, timeout, deadline)
        if call is None:
            async with aclosing(self._main.download(method, request, timeout=timeout, place=place)) as frames:
                async for frame in frames:
                    yield frame
            return
        call.line.place = place
        async with call:
            await call.within(call.line.send(Record(Kind.CALL, method.encode(), (memoryview(raw),) if raw else ())))
            while True:
                record = await call.within(call.line.receive())
                if record.kind is Kind.END:
                    call.complete = True
                    return
                if record.kind is Kind.ERROR:
                    call.complete = True
                    call.reply(record)
                yield record.frame()

    def beside(self, sock: socket.socket) -> LocalChannel:
        """See `base.Channel`."""
        return LocalChannel(self, sock)

    async def close(self) -> None:
        """See `base.Channel`."""
        fork.check()
        self._closed = True
        self._idle.clear()
        lines = list(self._open)
        for line in lines:
            line.close(_CLOSED)
        await self._main.close()
        await asyncio.gather(*(line.released() for line in lines))

    # ---- connections

    async def _begin(self, method: str, timeout: float, deadline: float) -> _Call | None:
        """A connection for one call; None: the call goes over the main channel."""
        fork.check()
        where = f"{method} at {self.address}"
        if self._closed:
            raise unavailable(where, _CLOSED)
        identity, _ = self._contexts.current()
        while self._idle:
            line, of = self._idle.pop()
            if line.quiet and of is identity:
                return _Call(self, line, of, where, timeout, deadline)
            self._drop(line)
        if self._never or time.monotonic() < self._again_at:
            return None
        return await in_time(where, timeout, deadline, self._connect(where, timeout, deadline))

    async def _connect(self, where: str, timeout: float, deadline: float) -> _Call | None:
        """A new connection, opened with a token."""
        try:
            offer = await self._main.call(_OPEN, shard_pb2.OpenBulkRequest(), timeout=timeout)
        except errors.VersionMismatchError:
            self._never = True
            self.why_not = "the server does not know bulk connections"
            return None
        except errors.ParamServerError as error:  # of the call for which the connection is needed
            raise type(error)(str(error).replace(f"{_OPEN} at {self.address}", where)) from None
        assert isinstance(offer, shard_pb2.OpenBulkResponse)
        if not offer.port:
            self._never = True
            self.why_not = offer.reason or "the server offers no bulk connections"
            return None
        identity, context = self._contexts.current()
        try:
            async with asyncio.timeout(_CONNECT_S):
                sock = await _connected(self._host, offer.port)
                moving, _ = await greet(sock, context, self._peer)
        except (OSError, TimeoutError) as error:
            self.failed(offer.port, str(error) or "no answer")
            return None
        line = Line(moving)
        if self._closed:
            line.close(_CLOSED)
            raise unavailable(where, _CLOSED)
        self._open.add(line)
        self.why_not = ""
        await line.send(Record(Kind.HELLO, offer.token))
        return _Call(self, line, identity, where, timeout, deadline, offer.port)

    def failed(self, port: int, reason: str) -> None:
        """A new connection could not be made, or was closed before anything came over it."""
        self._again_at = time.monotonic() + _AGAIN_S
        if not self.why_not:
            log.warning(
                "weights and gradients go over gRPC: the bulk port of a server cannot be reached",
                server=self.address,
                port=port,
                reason=reason,
            )
        self.why_not = f"port {port} of {self._host} cannot be reached ({reason})"

    def back(self, call: _Call) -> None:
        """A call has ended. Its connection takes another one if nothing of the call is left on it."""
        if call.complete and call.line.quiet and not self._closed:
            self._idle.append((call.line, call.identity))
        else:
            self._drop(call.line)

    def _drop(self, line: Line) -> None:
        line.close()
        if line.busy:
            asyncio.ensure_future(line.released()).add_done_callback(lambda _: self._open.discard(line))
        else:
            self._open.discard(line)


class _Call:
    """One call, on a connection of its own until it ends. Leaving the context gives up what is left of it."""

    def __init__(
        self,
        channel: BulkChannel,
        line: Line,
        identity: Identity | None,
        where: str,
        timeout: float,
        deadline: float,
        port: int = 0,
    ) -> None:
        """``port``: of the peer, if the connection is new."""
        self.line, self.identity = line, identity
        self._port = port
        # Whether all of the call was sent and answered.
        self.complete = False
        self._channel, self._where, self._timeout, self._deadline = channel, where, timeout, deadline

    async def __aenter__(self) -> _Call:
        return self

    async def __aexit__(self, *_: object) -> None:
        placed, self.line.place = self.line.place is not None, None
        self._channel.back(self)
        if placed and not self.complete:
            await self.line.released()

    async def within(self, work: Awaitable[T]) -> T:
        """Do a part of the call's work. Raises DeadlineError, or UnavailableError if the connection is lost."""
        try:
            return await in_time(self._where, self._timeout, self._deadline, work)
        except LostError as error:
            if self._port and not self.line.heard:  # the next try goes over gRPC
                self._channel.failed(self._port, str(error))
            raise unavailable(self._where, str(error)) from None

    def reply(self, record: Record) -> bytes:
        """The reply in a record. Raises the error in it, or ProtocolError."""
        if record.kind is Kind.REPLY:
            return record.data()
        if record.kind is not Kind.ERROR:
            raise errors.ProtocolError(f"{self._where}: a record of kind {record.kind.name} came where a reply belongs")
        error = remote_error(record.header.decode("ascii", "replace"), record.data().decode("utf-8", "replace"))
        if isinstance(error, errors.VersionMismatchError) and not str(error):
            raise unknown_call(self._where)
        raise error


async def _connected(host: str, port: int) -> socket.socket:
    """A socket that is connected. Raises OSError."""
    loop = asyncio.get_running_loop()
    failed: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, where)
            return sock
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
    raise failed
