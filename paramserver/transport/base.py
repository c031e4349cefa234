"""The interface of all transports: callers and services on one side, an implementation that moves bytes on the other.

Callers hold a `Channel` to one peer; a service is any object with one method per RPC. Implementations move encoded
bytes, so that nothing is shared by reference and a fake cannot be kinder than the network. All implementations pass the
same contract suite.

A service's methods bear the RPC's name in snake case:

    unary      async def join(self, request: Message) -> Message
    upload     async def push(self, frames: AsyncIterator[AnyFrame]) -> Message
    download   def pull(self, request: Message) -> AsyncIterator[AnyFrame]                   an async generator
    session    def session(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]   an async generator

Methods raise `paramserver.errors`; the caller sees the same class with the same text. Any other exception of a method
becomes a ParamServerError without details at the caller, and is logged with its traceback where it happened. A method
is cancelled when the caller has gone: the frames of an upload then never just end.

The caller is checked before the service hears of the call; `caller` gives the service its roles. An address may end
with the number of a shard (`addresses.shard_address`); `addressed` gives it to the service.
"""

from __future__ import annotations

import asyncio
import enum
import re
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from paramserver.errors import ProtocolError
from paramserver.frames import MAX_FRAME_BYTES, AnyFrame, header_of, message_of
from paramserver.v1 import coordinator_pb2, shard_pb2

T = TypeVar("T")

# No message of any kind is larger. Frames have a lower limit of their own.
MAX_MESSAGE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Caller:
    """The maker of a call: roles that it may be taken for (see `policy`), and whether it has shown the admin token.

    ``proof``: the SHA-256 of the secret that it has shown, which tells members apart; empty: it has shown none.
    None: caller and service are in one process, and nobody is told apart.
    """

    roles: frozenset[str]
    admin: bool
    proof: bytes | None = None


_caller: ContextVar[Caller | None] = ContextVar("paramserver_caller", default=None)


def caller() -> Caller | None:
    """The maker of the call that this task answers; None outside of a service's methods."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Note who made a call. Transports do so at the start of the task that answers the call."""
    _caller.set(caller)


_host: ContextVar[str] = ContextVar("paramserver_host", default="")


def caller_host() -> str:
    """The number of the host that has made the call which this task answers; empty if the transport does not say it."""
    return _host.get()


def set_host(host: str) -> None:
    """Note the host of a caller. Transports do so at the start of the task that answers the call."""
    _host.set(host)


_shown: ContextVar[bytes] = ContextVar("paramserver_shown", default=b"")


def shown() -> bytes:
    """The secret that calls of this task show instead of the secret of the process; empty: none."""
    return _shown.get()


@contextmanager
def showing(secret: bytes) -> Iterator[None]:
    """Within this context, calls show ``secret``: the key of the server that is called. Empty: that of the process."""
    before = _shown.set(secret)
    try:
        yield
    finally:
        _shown.reset(before)


_shard: ContextVar[int | None] = ContextVar("paramserver_shard", default=None)


def addressed() -> int | None:
    """The number of the shard to which the call is addressed that this task answers; None: the address names none."""
    return _shard.get()


def set_addressed(shard: int | None) -> None:
    """Note the shard to which a call is addressed. Transports do so at the start of the task that answers the call."""
    _shard.set(shard)


# The frames of an upload: all at hand, or made one by one.
Frames = Iterable[AnyFrame] | AsyncIterable[AnyFrame]


async def each(frames: Frames) -> AsyncIterator[AnyFrame]:
    """The frames one by one."""
    if isinstance(frames, AsyncIterable):
        async for raw in frames:
            yield raw
    else:
        for raw in frames:
            yield raw


# Where the data of a frame is to be received, by the encoded header and the size of the data in bytes: a writable
# view of that size, or None for memory of its own. Called in any thread.
Place = Callable[[bytes, int], memoryview | None]


class Channel(Protocol):
    """The client's side of the connection to one peer. Nothing is connected before the first call.

    ``method`` is a key of METHODS. ``timeout`` is in seconds and covers the whole call, with all its frames.
    All calls raise what the service raised, or UnavailableError, DeadlineError, OverloadedError, ProtocolError (a
    message over MAX_MESSAGE_BYTES among others), VersionMismatchError (the peer does not know the method). Cancelling a
    call cancels it at the peer.
    """

    @property
    def kind(self) -> str:
        """The transport of frames: "memory", "bulk" or "grpc". After a colon: why it is not "bulk"."""
        ...

    @property
    def address(self) -> str:
        """The peer's address as the caller gave it."""
        ...

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """One message there, one back, of the types in METHODS."""
        ...

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """Send ``frames``, none of which is empty; returns the reply.

        A frame is taken only when the peer has room for the last frame but one.

        The peer may answer before the last frame; the rest is then not taken. An exception of ``frames`` passes
        through, after the call has been cancelled at the peer.
        """
        ...

    def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """The frames of the peer's answer. Close the generator (`contextlib.aclosing`) to cancel the rest.

        ``place``: a hint; a transport that receives into memory of its own ignores it. When the generator has ended or
        is closed, nothing is written to these places any more.
        """
        ...

    def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """Messages both ways, independently, without a deadline.

        The end of ``requests`` is passed on to the peer, answers still come. An exception of ``requests`` ends the
        session and passes through. Close the generator to hang up.
        """
        ...

    def beside(self, sock: socket.socket) -> Neighbour:
        """Unary calls to the same peer over a connected socket that it has handed over. Does not close this channel."""
        ...

    async def close(self) -> None:
        """Open calls end with UnavailableError, and so do later ones. May be repeated."""
        ...


class Neighbour(Protocol):
    """Unary calls to a peer on the same host; see `shm.channel`. Streams go over the channel to which it belongs."""

    @property
    def undisturbed(self) -> bool:
        """Whether calls may go past this object; False while it is to count calls, or to make some fail."""
        ...

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `Channel.call`."""
        ...

    async def close(self) -> None:
        """See `Channel.close`."""
        ...


class MethodKind(enum.Enum):
    """The kind of traffic of a method, from the caller's side."""

    UNARY = "unary"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC of the protocol."""

    name: str  # "Shard.Push"
    path: str  # "/paramserver.v1.ShardService/Push"
    kind: MethodKind
    request: type[Message]
    response: type[Message]
    handler: str  # "push", the name of the service's method

    @property
    def service(self) -> str:
        """The first half of the name: "Shard"."""
        return self.name.partition(".")[0]

    def encode_request(self, message: Message) -> bytes:
        """The message as bytes. Raises ProtocolError if it is too large."""
        assert isinstance(message, self.request), f"{self.name} takes a {self.request.__name__}, not {type(message)}"
        return checked(self, message.SerializeToString())

    def decode_request(self, raw: bytes) -> Message:
        """The message in these bytes. Raises ProtocolError if they are malformed."""
        return _decode(self.request, raw, self)

    def encode_response(self, message: Message) -> bytes:
        """The message as bytes. Raises ProtocolError if it is too large."""
        assert isinstance(message, self.response), f"{self.name} gives a {self.response.__name__}, not {type(message)}"
        return checked(self, message.SerializeToString())

    def decode_response(self, raw: bytes) -> Message:
        """The message in these bytes. Raises ProtocolError if they are malformed."""
        return _decode(self.response, raw, self)


def checked(method: Method, raw: bytes) -> bytes:
    """The message itself. Raises ProtocolError if it is too large to be sent."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise too_large(method.name, len(raw), MAX_MESSAGE_BYTES)
    return raw


def frame(method: Method, raw: AnyFrame) -> bytes:
    """A frame about to be sent as one message. Raises ProtocolError if it is too large."""
    message = message_of(whole(method, raw))
    return checked(method, message)


def whole(method: Method, raw: AnyFrame) -> AnyFrame:
    """A frame about to be sent in its pieces. Raises ProtocolError if it is too large."""
    assert isinstance(raw, AnyFrame), f"{method.name}: that is no frame: {type(raw).__name__}"
    assert len(raw), f"{method.name}: a frame is never empty"
    if len(raw) > MAX_MESSAGE_BYTES:
        raise too_large(method.name, len(raw), MAX_MESSAGE_BYTES)
    return raw


async def reply(method: Method, handler: Any, sent: bytes | AsyncIterator[AnyFrame]) -> bytes:
    """The encoded reply of a service's method to a unary call (``sent``: the request) or an upload (its frames)."""
    return method.encode_response(await handler(_argument(method, sent)))


async def answer(
    method: Method,
    handler: Any,
    sent: bytes | AsyncIterator[AnyFrame],
    send: Callable[[T], Awaitable[object]],
    form: Callable[[Method, AnyFrame], T],
) -> None:
    """Send the answers of a service's method to a download (``sent``: the request) or a session (requests).

    The answers of a session are messages, or messages that are encoded already, since all sessions get the same ones.
    ``form``: how this transport sends a frame: `frame` or `whole`.
    """
    async with aclosing(handler(_argument(method, sent))) as answers:
        async for item in answers:
            sent_item: Any = form(method, item) if isinstance(item, AnyFrame) else method.encode_response(item)
            await send(sent_item)


def _argument(method: Method, sent: bytes | AsyncIterator[AnyFrame]) -> Message | AsyncIterator[AnyFrame | Message]:
    """The argument of a service's method."""
    if isinstance(sent, bytes):
        return method.decode_request(sent)
    return sent if method.kind is MethodKind.UPLOAD else _parsed(method, sent)


async def _parsed(method: Method, requests: AsyncIterator[AnyFrame]) -> AsyncIterator[Message]:
    async for raw in requests:
        yield method.decode_request(message_of(raw))


def _header(method: Method, raw: AnyFrame) -> Message:
    """The header of the first frame of an upload, wherever it stands in the frame."""
    if head := header_of(raw):
        return _decode(shard_pb2.FrameHeader, head, method)
    frame = shard_pb2.Frame()
    try:
        frame.ParseFromString(message_of(raw))
    except DecodeError as error:
        raise ProtocolError(f"{method.name}: the first {len(raw)} bytes are no frame") from error
    return frame.header


def failure(task: asyncio.Task[Any]) -> BaseException | None:
    """The exception that has ended a task; None if there is none, or the task still runs."""
    return task.exception() if task.done() and not task.cancelled() else None


def too_large(where: str, size: int, limit: int) -> ProtocolError:
    """The error for a message that is too large, at either end."""
    return ProtocolError(
        f"{where}: a message of {size} bytes is over the limit of {limit} bytes; send it in smaller parts"
    )


def find(method: str, *kinds: MethodKind) -> Method:
    """The method of that name, which must be of one of these kinds."""
    found = METHODS[method]
    assert found.kind in kinds, f"{method} is no {' or '.join(kind.value for kind in kinds)}"
    return found


def handlers(services: Sequence[tuple[str, object]]) -> Iterator[tuple[Method, Any]]:
    """Every RPC of these ``services`` ("Shard" or "Coordinator", and the object) with the object's method for it.

    If the object's class has a method ``judge``, that hears of each request and of the header of each upload first, and
    may raise. Raises AttributeError if a method is missing.
    """
    for name, service in services:
        mine = [method for method in METHODS.values() if method.service == name]
        assert mine, f"there is no service {name!r}"
        judge: Judge | None = service.judge if hasattr(type(service), "judge") else None  # type: ignore[attr-defined]
        for method in mine:
            handler = getattr(service, method.handler)
            yield method, handler if judge is None else _judged(judge, method, handler)


Judge = Callable[[Method, Message], None]


def _judged(judge: Judge, method: Method, handler: Any) -> Any:
    """A service's method that begins, and goes on, only if ``judge`` does not raise."""

    async def unary(request: Message) -> Message:
        judge(method, request)
        answer: Message = await handler(request)
        return answer

    def download(request: Message) -> Any:
        judge(method, request)
        return handler(request)

    async def uploaded(frames: AsyncIterator[AnyFrame]) -> AsyncIterator[AnyFrame]:
        first = True
        async for raw in frames:
            if first and len(raw) <= MAX_FRAME_BYTES:  # nobody reads a larger one
                judge(method, _header(method, raw))
            first = False
            yield raw

    async def said(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for request in requests:
            judge(method, request)
            yield request

    return {
        MethodKind.UNARY: unary,
        MethodKind.DOWNLOAD: download,
        MethodKind.UPLOAD: lambda frames: handler(uploaded(frames)),
        MethodKind.SESSION: lambda requests: handler(said(requests)),
    }[method.kind]


def _decode(kind: type[Message], raw: bytes, method: Method) -> Message:
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise ProtocolError(f"{method.name}: {len(raw)} bytes that are no {kind.__name__}") from error
    return message


def _kind(descriptor: MethodDescriptor) -> MethodKind:
    frames_up = descriptor.input_type.full_name == shard_pb2.Frame.DESCRIPTOR.full_name
    frames_down = descriptor.output_type.full_name == shard_pb2.Frame.DESCRIPTOR.full_name
    match (descriptor.client_streaming, frames_up, descriptor.server_streaming, frames_down):
        case (False, False, False, False):
            return MethodKind.UNARY
        case (True, True, False, False):
            return MethodKind.UPLOAD
        case (False, False, True, True):
            return MethodKind.DOWNLOAD
        case (True, False, True, False):
            return MethodKind.SESSION
    raise AssertionError(f"{descriptor.full_name} has a shape that no transport carries")


def _methods(*files: FileDescriptor) -> Mapping[str, Method]:
    table = {}
    for file in files:
        for service in file.services_by_name.values():
            for descriptor in service.methods:
                name = f"{service.name.removesuffix('Service')}.{descriptor.name}"
                table[name] = Method(
                    name,
                    f"/{service.full_name}/{descriptor.name}",
                    _kind(descriptor),
                    GetMessageClass(descriptor.input_type),
                    GetMessageClass(descriptor.output_type),
                    re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", descriptor.name).lower(),
                )
    return table


METHODS: Mapping[str, Method] = _methods(shard_pb2.DESCRIPTOR, coordinator_pb2.DESCRIPTOR)
