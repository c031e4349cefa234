"""The transport between two processes of one host that share memory: unary calls over a socket that they handed over.

A small call there and back takes a fraction of the time of gRPC. When the bytes lie in shared memory, calls are most of
a step. A :class:`LocalChannel` belongs to a channel of another kind, which is used once the socket is gone, and for all
streams. Whether the other process may call was decided when the socket was handed over.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from paramserver import errors
from paramserver.transport.base import (
    MAX_MESSAGE_BYTES,
    Caller,
    Channel,
    Method,
    MethodKind,
    find,
    handlers,
    reply,
    set_addressed,
    set_caller,
)
from paramserver.transport.envelopes import pack, unpack
from paramserver.transport.failures import answered, in_time, remote_error, unavailable, unknown_call
from paramserver.transport.security.policy import CALLERS
from paramserver.v1.local_pb2 import Envelope

_STOPPED = "it stopped or closed the connection"
_CLOSED = "this channel is closed"


class Line(asyncio.Protocol):
    """One end of the socket. What is sent in one turn of the loop goes out together."""

    def __init__(self) -> None:
        self.gone = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._come = bytearray()
        self._going: list[bytes] = []
        self._room = asyncio.Event()
        self._room.set()

    def heard(self, envelope: Envelope) -> None:
        """Take in an envelope."""
        raise NotImplementedError

    def lost(self) -> None:
        """Nothing comes any more."""
        raise NotImplementedError

    def post(self, envelope: Envelope) -> None:
        """Send it in this turn of the loop, whether or not there is room."""
        if self.gone:
            return
        if not self._going:
            self._loop.call_soon(self._flush)
        raw = pack(envelope)
        self._going.append(raw)
        if len(raw) > MAX_MESSAGE_BYTES // 4:
            self._flush()

    async def drained(self) -> None:
        """Wait until there is room again."""
        if not self._room.is_set():
            await self._room.wait()

    def _flush(self) -> None:
        going, self._going = self._going, []
        if going and self._transport is not None and not self.gone:
            self._transport.write(b"".join(going) if len(going) > 1 else going[0])

    def close(self) -> None:
        """Hang up, once what was sent in this turn is out."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
        self._lose()

    def _lose(self) -> None:
        if not self.gone:
            self.gone = True
            self._room.set()
            self.lost()

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lose()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._room.clear()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._room.set()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._come += data
        try:
            for envelope in unpack(self._come):
                self.heard(envelope)
        except errors.ProtocolError:
            self.close()


async def join(line: Line, sock: socket.socket) -> None:
    """Have ``line`` use a connected socket, which is taken over."""
    sock.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: line, sock=sock)


# ---- the called side


class LocalServer(Line):
    """Answers the calls of one process. Made by `serve`."""

    def __init__(self, services: Sequence[tuple[str, object]], caller: Caller, shard: int | None) -> None:
        super().__init__()
        self._caller, self._shard = caller, shard
        self._handlers = {
            method.name: (method, handler)
            for method, handler in handlers(services)
            if method.kind is MethodKind.UNARY  # streams go over other channels
        }
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def heard(self, envelope: Envelope) -> None:
        """A call begins, or is given up."""
        call = envelope.call
        if envelope.cancel:
            if call in self._tasks:  # the call may have come in the same piece; it begins in spite of that
                self._loop.call_soon(self._tasks[call].cancel)
        elif envelope.method and call not in self._tasks:
            task = self._tasks[call] = self._loop.create_task(self._answer(envelope))
            task.add_done_callback(lambda _: self._tasks.pop(call))

    async def _answer(self, asked: Envelope) -> None:
        set_caller(self._caller)
        set_addressed(self._shard)
        try:
            method, handler = self._find(asked.method)
            raw = await answered(asked.method, lambda: reply(method, handler, asked.message))
            self.post(Envelope(call=asked.call, message=raw))
        except errors.ParamServerError as error:
            self.post(Envelope(call=asked.call, error=type(error).__name__, text=str(error)))
        await self.drained()

    def _find(self, name: str) -> tuple[Method, Any]:
        if name not in self._handlers:
            raise errors.VersionMismatchError  # the caller has the words for it
        if not CALLERS[name] & self._caller.roles:
            raise errors.DeniedError(f"{name}: permission denied")
        return self._handlers[name]

    def lost(self) -> None:
        """The caller is gone, or this end has hung up."""
        for task in self._tasks.values():
            task.cancel()

    async def stop(self, grace: float = 0.0) -> None:
        """Give calls in flight ``grace`` seconds, then cancel them, wait for their end, hang up."""
        if self._tasks and grace > 0:
            await asyncio.wait(self._tasks.values(), timeout=grace)
        if tasks := list(self._tasks.values()):
            self.lost()
            await asyncio.wait(tasks)
        self.close()


async def serve(
    sock: socket.socket, services: Sequence[tuple[str, object]], caller: Caller, shard: int | None = None
) -> LocalServer:
    """Answer the calls of ``caller``, who is at the other end of a connected socket. Takes ``sock`` over.

    ``shard``: the shard to which all these calls are addressed.
    """
    server = LocalServer(services, caller, shard)
    await join(server, sock)
    return server


# ---- the calling side


class Asking(Line):
    """The calling end."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        # By call. An answer of None: the line was lost.
        self._waiting: dict[int, asyncio.Future[Envelope | None]] = {}

    async def ask(self, method: str, request: bytes) -> Envelope | None:
        """Make a call and wait for its answer; None if the line is lost. Cancelling it gives the call up."""
        if self.gone:
            return None
        call = next(self._numbers)
        coming: asyncio.Future[Envelope | None] = self._loop.create_future()
        self._waiting[call] = coming
        try:
            self.post(Envelope(call=call, method=method, message=request))
            await self.drained()
            return await coming
        finally:
            del self._waiting[call]
            if coming.cancelled() or not coming.done():
                self.post(Envelope(call=call, cancel=True))

    def heard(self, envelope: Envelope) -> None:
        """The answer to a call has come, unless the call was given up."""
        coming = self._waiting.get(envelope.call)
        if coming is not None and not coming.done():
            coming.set_result(envelope)

    def lost(self) -> None:
        """The other process is gone, or this end has hung up."""
        for coming in self._waiting.values():
            if not coming.done():
                coming.set_result(None)


class LocalChannel:
    """See `base.Neighbour`. ``main`` leads to the same peer; calls go over it when the other end of ``sock`` is gone.

    Takes ``sock`` over, but not ``main``: :meth:`close` leaves that open.
    """

    undisturbed = True

    def __init__(self, main: Channel, sock: socket.socket) -> None:
        self._main = main
        self._sock: socket.socket | None = sock
        self._line: Asking | None = None
        self._joining: asyncio.Task[None] | None = None
        self._closed = False

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Neighbour`."""
        found, where = find(method, MethodKind.UNARY), f"{method} at {self._main.address}"
        if self._closed:
            raise unavailable(where, _CLOSED)
        line = await self._present()
        if line is None or line.gone:
            return await self._main.call(method, request, timeout=timeout)
        deadline = asyncio.get_running_loop().time() + timeout
        answer = await in_time(where, timeout, deadline, line.ask(method, found.encode_request(request)))
        if answer is None:
            raise unavailable(where, _CLOSED if self._closed else _STOPPED)
        if answer.error:
            error = remote_error(answer.error, answer.text)
            raise unknown_call(where) if isinstance(error, errors.VersionMismatchError) and not answer.text else error
        return found.decode_response(answer.message)

    async def close(self) -> None:
        """See `base.Neighbour`."""
        self._closed = True
        if self._joining is not None:
            await asyncio.wait([self._joining])
        if self._line is not None:
            self._line.close()
        elif self._sock is not None:
            self._sock.close()

    async def _present(self) -> Asking | None:
        """The line. None: it could not be joined."""
        if self._line is None:
            if self._joining is None:
                self._joining = asyncio.get_running_loop().create_task(self._join())
            await asyncio.shield(self._joining)
        return self._line

    async def _join(self) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None, "a socket is joined once"
        line = Asking()
        await join(line, sock)
        self._line = line
