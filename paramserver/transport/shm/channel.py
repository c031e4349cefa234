"""The transport between two processes of one host that share memory: calls over a socket that they have handed over.

A small call there and back takes a fraction of the time of gRPC. When the bytes lie in shared memory, calls are most of
a step. A :class:`LocalChannel` belongs to a channel of another kind, which is used once the socket is gone. Whether the
other process may call was decided when the socket was handed over.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport.base import (
    MAX_MESSAGE_BYTES,
    Caller,
    Channel,
    Frames,
    Method,
    MethodKind,
    answer,
    each,
    find,
    frame,
    handlers,
    reply,
    set_addressed,
    set_caller,
)
from paramserver.transport.envelopes import WINDOW, pack, unpack
from paramserver.transport.failures import answered, in_time, remote_error, unavailable, unknown_call
from paramserver.transport.security.policy import CALLERS
from paramserver.v1.local_pb2 import Envelope

T = TypeVar("T")

# The reader of a call lets so many more messages come when it has taken as many.
_REFILL = WINDOW // 2
_STOPPED = "it stopped or closed the connection"
_CLOSED = "this channel is closed"


class _Stream:
    """The messages of one call, both ways, at one of its ends."""

    def __init__(self, line: _Line, call: int, caller: bool) -> None:
        self._line, self._call, self._caller = line, call, caller
        self._come: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._credit, self._taken = WINDOW, 0
        # Whether the other end sends no more; the reason, if the call has failed.
        self.ended = False
        self.failure: errors.ParamServerError | None = None

    def hear(self, envelope: Envelope) -> None:
        """Take in an envelope that has come for this call."""
        self._come.extend(envelope.messages)
        self._credit += envelope.credit
        if envelope.error:
            self.failure = remote_error(envelope.error, envelope.text)
        self.ended = self.ended or envelope.end or bool(envelope.error)
        self._changed.set()

    def break_off(self, failure: errors.ParamServerError) -> None:
        """Nothing more can come."""
        self.failure, self.ended = self.failure or failure, True
        self._changed.set()

    async def take(self) -> bytes | None:
        """The next message, None after the last one. Raises what the call failed with."""
        while not self._come:
            if self.failure is not None:
                raise self.failure
            if self.ended:
                return None
            await self._change()
        self._taken += 1
        if self._taken % _REFILL == 0 and not self.ended:
            self._line.post(Envelope(call=self._call, credit=_REFILL))
        return self._come.popleft()

    async def rest(self) -> AsyncIterator[bytes]:
        """All messages that still come."""
        while (raw := await self.take()) is not None:
            yield raw

    async def send(self, raw: bytes, method: str = "", end: bool = False) -> bool:
        """Send a message when there is room. False: the call has ended already, or nobody is there."""
        while self._credit <= 0 and not self._over:
            await self._change()
        if self._over:
            return False
        self._credit -= 1
        self._line.post(Envelope(call=self._call, method=method, messages=[raw], end=end))
        await self._line.drained()
        return True

    def post(self, **fields: Any) -> None:
        """Send an envelope of this call that is no message."""
        self._line.post(Envelope(call=self._call, **fields))

    @property
    def _over(self) -> bool:
        return self._line.gone or (self._caller and self.ended)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _Line(asyncio.Protocol):
    """One end of the socket. What is sent in one turn of the loop goes out together."""

    def __init__(self) -> None:
        self.streams: dict[int, _Stream] = {}
        self.gone = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._come = bytearray()
        self._going: list[bytes] = []
        self._room = asyncio.Event()
        self._room.set()

    def heard(self, envelope: Envelope) -> None:
        """Take in an envelope that belongs to no stream."""

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
        self.gone = True
        self._room.set()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.break_off(self.loss())

    def loss(self) -> errors.ParamServerError:
        """The error of all calls in flight when the line is gone."""
        return errors.UnavailableError("the other process is gone")

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
                stream = self.streams.get(envelope.call)
                if stream is None:
                    self.heard(envelope)
                else:
                    stream.hear(envelope)
                    if envelope.cancel:
                        self.heard(envelope)
        except errors.ProtocolError:
            self.close()


async def _join(line: _Line, sock: socket.socket) -> None:
    sock.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: line, sock=sock)


# ---- the called side


class LocalServer(_Line):
    """Answers the calls of one process. Made by `serve`."""

    def __init__(self, services: Sequence[tuple[str, object]], caller: Caller, shard: int | None) -> None:
        super().__init__()
        self._caller, self._shard = caller, shard
        self._handlers = {
            method.name: (method, handler) for method, handler in handlers(services) if method.kind in _ANSWERS
        }
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def heard(self, envelope: Envelope) -> None:
        """A call begins, or is given up."""
        call = envelope.call
        if envelope.cancel:
            if call in self._tasks:  # the call may have come in the same piece; it begins in spite of that
                self._loop.call_soon(self._tasks[call].cancel)
        elif envelope.method and call not in self._tasks:
            stream = self.streams[call] = _Stream(self, call, caller=False)
            stream.hear(envelope)
            task = self._tasks[call] = self._loop.create_task(self._answer(stream, envelope.method))
            task.add_done_callback(lambda _: self._ended(call))

    def _ended(self, call: int) -> None:
        del self._tasks[call]
        self.streams.pop(call, None)

    async def _answer(self, stream: _Stream, name: str) -> None:
        set_caller(self._caller)
        set_addressed(self._shard)
        try:
            method, handler = self._find(name)
            await answered(name, lambda: _ANSWERS[method.kind](stream, method, handler))
        except errors.ParamServerError as error:
            stream.post(error=type(error).__name__, text=str(error))

    def _find(self, name: str) -> tuple[Method, Any]:
        if name not in self._handlers:
            raise errors.VersionMismatchError  # the caller has the words for it
        if not CALLERS[name] & self._caller.roles:
            raise errors.DeniedError(f"{name}: permission denied")
        return self._handlers[name]

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller is gone, or this end has hung up."""
        super().connection_lost(exc)
        self._abandon()

    def _abandon(self) -> set[asyncio.Task[None]]:
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def stop(self, grace: float = 0.0) -> None:
        """Give calls in flight ``grace`` seconds, then cancel them, wait for their end, hang up."""
        if self._tasks and grace > 0:
            await asyncio.wait(self._tasks.values(), timeout=grace)
        if tasks := self._abandon():
            await asyncio.wait(tasks)
        self.close()


async def serve(
    sock: socket.socket, services: Sequence[tuple[str, object]], caller: Caller, shard: int | None = None
) -> LocalServer:
    """Answer the calls of ``caller``, who is at the other end of a connected socket. Takes ``sock`` over.

    ``shard``: the shard to which all these calls are addressed.
    """
    server = LocalServer(services, caller, shard)
    await _join(server, sock)
    return server


async def _first(stream: _Stream, method: Method) -> bytes:
    raw = await stream.take()
    if raw is None:
        raise errors.ProtocolError(f"{method.name}: the call has no message")
    return raw


async def _unary(stream: _Stream, method: Method, handler: Any) -> None:
    await stream.send(await reply(method, handler, await _first(stream, method)), end=True)


async def _upload(stream: _Stream, method: Method, handler: Any) -> None:
    await stream.send(await reply(method, handler, stream.rest()), end=True)


async def _download(stream: _Stream, method: Method, handler: Any) -> None:
    async def send(item: bytes) -> None:
        if not await stream.send(item):
            raise errors.UnavailableError("the caller went away in the middle of the answer")

    await answer(method, handler, await _first(stream, method), send, frame)
    stream.post(end=True)


_ANSWERS: dict[MethodKind, Any] = {
    MethodKind.UNARY: _unary,
    MethodKind.UPLOAD: _upload,
    MethodKind.DOWNLOAD: _download,
}


# ---- the calling side


class _Caller(_Line):
    """The calling end."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def begin(self) -> tuple[int, _Stream]:
        """A call, of which nothing has been sent yet."""
        call = next(self._numbers)
        stream = self.streams[call] = _Stream(self, call, caller=True)
        return call, stream


class LocalChannel:
    """See `base.Channel`. ``main`` leads to the same peer; calls go over it when the other end of ``sock`` is gone.

    Takes ``sock`` over, but not ``main``: :meth:`close` leaves that open.
    """

    def __init__(self, main: Channel, sock: socket.socket) -> None:
        self.kind, self.address = main.kind, main.address
        self._main = main
        self._sock: socket.socket | None = sock
        self._line: _Caller | None = None
        self._joining: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def undisturbed(self) -> bool:
        """See `base.Neighbour`."""
        return True

    @property
    def alive(self) -> bool:
        """Whether calls go over the socket, as far as that is known."""
        return not self._closed and (self._line is None or not self._line.gone)

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UNARY)
        if (line := await self._present(method)) is None:
            return await self._main.call(method, request, timeout=timeout)
        raw = found.encode_request(request)
        with _Calling(self, line, method, timeout) as calling:
            return found.decode_response(await calling.within(calling.ask(raw)))

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UPLOAD)
        if (line := await self._present(method)) is None:
            return await self._main.upload(method, frames, timeout=timeout)

        async def talk(calling: _Calling) -> bytes:
            name, former = method, None
            async for raw in each(frames):
                if former is not None:
                    if not await calling.stream.send(former, name):
                        return await calling.last()
                    name = ""
                former = frame(found, raw)
            if former is None:
                calling.stream.post(method=name, end=True)
            else:
                await calling.stream.send(former, name, end=True)
            return await calling.last()

        with _Calling(self, line, method, timeout) as calling:
            return found.decode_response(await calling.within(talk(calling)))

    async def download(self, method: str, request: Message, *, timeout: float) -> AsyncGenerator[AnyFrame, None]:
        """See `base.Channel`."""
        found = find(method, MethodKind.DOWNLOAD)
        raw = found.encode_request(request)
        if (line := await self._present(method)) is None:
            async with aclosing(self._main.download(method, request, timeout=timeout)) as frames:
                async for item in frames:
                    yield item
            return
        with _Calling(self, line, method, timeout) as calling:
            await calling.within(calling.stream.send(raw, method, end=True))
            while (raw_answer := await calling.within(calling.stream.take())) is not None:
                yield raw_answer

    def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`. Goes over the main channel."""
        return self._main.session(method, requests)

    def beside(self, sock: socket.socket) -> LocalChannel:
        """See `base.Channel`."""
        return LocalChannel(self, sock)

    async def close(self) -> None:
        """See `base.Channel`."""
        self._closed = True
        if self._joining is not None:
            await asyncio.wait([self._joining])
        if self._line is not None:
            self._line.close()
        elif self._sock is not None:
            self._sock.close()

    def why(self) -> str:
        """The reason why no answer comes."""
        return _CLOSED if self._closed else _STOPPED

    async def _present(self, method: str) -> _Caller | None:
        """The line, None if it is gone."""
        if self._closed:
            raise unavailable(f"{method} at {self.address}", _CLOSED)
        if self._line is None:
            if self._joining is None:
                self._joining = asyncio.get_running_loop().create_task(self._join())
            await asyncio.shield(self._joining)
        return self._line if self._line is not None and not self._line.gone else None

    async def _join(self) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None, "a socket is joined once"
        line = _Caller()
        await _join(line, sock)
        self._line = line


class _Calling:
    """One call. Leaving the context gives up what is left of it."""

    def __init__(self, channel: LocalChannel, line: _Caller, method: str, timeout: float) -> None:
        self._channel, self._line, self._method, self._timeout = channel, line, method, timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._number, self.stream = line.begin()

    @property
    def _where(self) -> str:
        return f"{self._method} at {self._channel.address}"

    def __enter__(self) -> _Calling:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.streams.pop(self._number, None)
        if not self.stream.ended:
            self.stream.post(cancel=True)

    async def ask(self, raw: bytes) -> bytes:
        """One message there, one back."""
        await self.stream.send(raw, self._method, end=True)
        return await self.last()

    async def last(self) -> bytes:
        """The message of the answer, which is the last one of the call."""
        raw = await self.stream.take()
        if raw is None:
            raise errors.ProtocolError(f"{self._where}: the answer has no message")
        return raw

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Do a part of the call's work. Raises DeadlineError, or UnavailableError if the line is lost."""
        try:
            return await in_time(self._where, self._timeout, self._deadline, work)
        except errors.VersionMismatchError as error:
            raise error if str(error) else unknown_call(self._where) from None
        except errors.UnavailableError:
            if self._line.gone:
                raise unavailable(self._where, self._channel.why()) from None
            raise
