"""The calling side of the transport between processes; see `grpc`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine
from typing import Any

from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport import fork
from paramserver.transport.addresses import split_shard, target
from paramserver.transport.base import Frames, Method, MethodKind, Place, each, failure, find, frame
from paramserver.transport.failures import ERROR_KEY, connection_hint, denied, from_code, remote_error, unavailable
from paramserver.transport.grpc.server import END, SHARD_KEY
from paramserver.transport.grpcio import grpc
from paramserver.transport.limits import LIMITS, Limits
from paramserver.transport.security.access import DENIED, OPEN, Metadata, Security
from paramserver.transport.security.policy import COORDINATOR
from paramserver.transport.security.tls import Identity, channel_credentials, server_name
from paramserver.transport.shm.channel import LocalChannel

# After a failed write, the status of the call arrives in a moment.
_STATUS_POLL_S = 0.01
_STATUS_POLLS = 200
# Below this a task of its own costs more than it gains.
_SMALL_BYTES = 64 * 1024
_FAILED_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")


def connect(address: str, security: Security = OPEN, peer: str = COORDINATOR, limits: Limits = LIMITS) -> GrpcChannel:
    """A channel to "host:port" or "[::1]:port", or to a shard there. It belongs to the loop that makes it.

    ``peer`` is the role that has to be there, if there is TLS. Raises ConfigError if ``address`` is no address, or not
    safe to connect to with this ``security``; calls raise ConfigError for an unsafe host name, and DeniedError if the
    certificate of this process is out of date.
    """
    return GrpcChannel(address, security, peer, limits)


class _Wire:
    """A channel of gRPC, which is one connection, for as long as the certificates are the same."""

    def __init__(self, channel: grpc.aio.Channel, identity: Identity | None) -> None:
        self.identity = identity
        self.calls: set[_Call] = set()
        self._channel = channel
        self._multicallables: dict[str, Any] = {}

    def starter(self, method: Method) -> Any:
        """gRPC's callable that starts a call."""
        if method.name not in self._multicallables:
            make: Any = {
                MethodKind.UNARY: self._channel.unary_unary,
                MethodKind.UPLOAD: self._channel.stream_unary,
                MethodKind.DOWNLOAD: self._channel.unary_stream,
                MethodKind.SESSION: self._channel.stream_stream,
            }[method.kind]
            self._multicallables[method.name] = make(method.path)
        return self._multicallables[method.name]

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


class GrpcChannel:
    """See `base.Channel`.

    When the certificates have been replaced, calls go over a new connection; those in progress end on the old one.
    """

    kind = "grpc"

    def __init__(
        self,
        address: str,
        security: Security = OPEN,
        peer: str = COORDINATOR,
        limits: Limits = LIMITS,
    ) -> None:
        self.address = address
        self.security = security
        # The process at the address, and the head of each call that names the shard.
        self._process, shard = split_shard(address)
        self._head: Metadata = () if shard is None else ((SHARD_KEY, str(shard)),)
        self._target = target(self._process)
        security.check_numeric(self._process)
        self._peer = peer
        self._limits = limits
        self._wire: _Wire | None = None
        self._retired: set[_Wire] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Whether the peer has ever answered.
        self.heard = False
        self.closed = False
        fork.keep(self)

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UNARY)
        raw = found.encode_request(request)
        with await self._begin(found, timeout, raw) as call:
            return found.decode_response(await call.step(call.under))

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UPLOAD)
        with await self._begin(found, timeout) as call:
            async with _Writer(call) as writer:
                async for raw in each(frames):  # makes the next frame while the previous frame is on its way
                    if not await writer.write(frame(found, raw)):
                        break
                else:
                    if await writer.flush() and await call.write(END):
                        await call.step(call.under.done_writing())
            return found.decode_response(await call.step(call.under))

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """See `base.Channel`."""
        found = find(method, MethodKind.DOWNLOAD)
        raw = found.encode_request(request)
        with await self._begin(found, timeout, raw) as call:
            while (item := await call.step(call.under.read())) is not grpc.aio.EOF:
                yield item

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`."""
        found = find(method, MethodKind.SESSION)
        with await self._begin(found, None) as call:

            async def send() -> None:
                try:
                    async for request in requests:
                        if not await call.write(found.encode_request(request)):
                            return
                    await call.step(call.under.done_writing())
                except BaseException:
                    call.under.cancel()
                    raise

            sender = asyncio.get_running_loop().create_task(send())
            try:
                while (raw := await call.step(call.under.read())) is not grpc.aio.EOF:
                    yield found.decode_response(raw)
            except errors.UnavailableError:
                if (error := failure(sender)) is not None:
                    raise error from None
                raise
            finally:
                sender.cancel()
                await asyncio.wait([sender])
                failure(sender)

    def beside(self, sock: socket.socket) -> LocalChannel:
        """See `base.Channel`."""
        return LocalChannel(self, sock)

    async def close(self) -> None:
        """See `base.Channel`."""
        fork.check()
        self.closed = True
        wires = {self._wire, *self._retired} - {None}
        self._wire = None
        self._retired.clear()
        for wire in wires:
            assert wire is not None
            for call in list(wire.calls):
                call.end()
            await wire.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def ended(self, wire: _Wire) -> None:
        """A call has ended on it: the last one closes a wire that is no longer used."""
        if wire in self._retired and not wire.calls:
            self._retired.discard(wire)
            task = asyncio.get_running_loop().create_task(wire.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _begin(self, method: Method, timeout: float | None, *request: bytes) -> _Call:
        """Start a call."""
        fork.check()
        if self._wire is None and not self.closed:
            await self.security.check_connect(self._process, f"{method.name} at {self.address}")
        if self.closed:
            raise unavailable(f"{method.name} at {self.address}", "this channel is closed")
        wire = self._present()
        metadata = self.security.metadata(method.name) + self._head
        return _Call(self, wire, method, timeout, wire.starter(method)(*request, timeout=timeout, metadata=metadata))

    def _present(self) -> _Wire:
        """The wire for new calls: another one if the certificates have been replaced."""
        certificates = self.security.certificates
        identity = None if certificates is None else certificates.current()
        if self._wire is not None and self._wire.identity is identity:
            return self._wire
        self._loop = asyncio.get_running_loop()
        old, self._wire = self._wire, _Wire(self._connection(identity), identity)
        if old is not None:
            self._retired.add(old)
            self.ended(old)
        return self._wire

    def _connection(self, identity: Identity | None) -> grpc.aio.Channel:
        options = self._limits.client()
        no_compression = grpc.Compression.NoCompression
        if identity is None:
            return grpc.aio.insecure_channel(self._target, options=options, compression=no_compression)
        return grpc.aio.secure_channel(
            self._target,
            channel_credentials(identity),
            options=(*options, ("grpc.ssl_target_name_override", server_name(self._peer))),
            compression=no_compression,
        )


class _Call:
    """One call of gRPC, ``under``, whose errors become ours. Leaving the context cancels what is left of it."""

    def __init__(self, channel: GrpcChannel, wire: _Wire, method: Method, timeout: float | None, under: Any) -> None:
        self._channel = channel
        self._wire = wire
        self._method = method
        self._where = f"{method.name} at {channel.address}"
        self._timeout = timeout or 0.0
        self.under = under
        self._end: tuple[grpc.StatusCode, str, Any] | None = None
        # The tasks that wait for a step of it, and those of them that were woken since this channel is closed.
        self._waiting: set[asyncio.Task[Any]] = set()
        self._woken: set[asyncio.Task[Any]] = set()
        under.add_done_callback(self._note_end)
        wire.calls.add(self)

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.under.cancel()
        self._wire.calls.discard(self)
        self._channel.ended(self._wire)

    async def write(self, raw: bytes) -> bool:
        """Send a message when there is room. False if the call has ended already; how, the next `step` tells."""
        try:
            await self._cancellable(self.under.write(raw))
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return False
        return True

    def end(self) -> None:
        """This channel is closed.

        gRPC does not wake the writer of a call that is cancelled before it has begun. Nor does it wake a writer at once
        if the connection takes no bytes, since the peer is cut off.
        """
        self.under.cancel()
        for task in self._waiting:
            task.cancel()
            self._woken.add(task)

    async def step(self, step: Awaitable[Any]) -> Any:
        """Wait for something that the call does."""
        try:
            result = await self._cancellable(step)
        except grpc.aio.AioRpcError as error:
            raise await self._error() from error
        self._channel.heard = True
        return result

    async def _cancellable(self, step: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if self._channel.closed:  # nobody would wake this task
            if asyncio.iscoroutine(step):
                step.close()
            raise unavailable(self._where, "this channel is closed")
        before = task.cancelling()
        self._waiting.add(task)
        try:
            return await step
        except asyncio.CancelledError:
            if (task.uncancel() if task in self._woken else task.cancelling()) > before:
                self.under.cancel()
                raise
            # Not we were cancelled, but the call: by the peer, or since this channel was closed.
            reason = "this channel is closed" if self._channel.closed else "it stopped or closed the connection"
            raise unavailable(self._where, reason) from None
        finally:
            self._waiting.discard(task)
            self._woken.discard(task)

    def _note_end(self, _: object = None) -> None:
        """Take down how the call ended.

        gRPC calls this once, at the first status. A failed write sets a status of its own that says nothing, before or
        after the real one.
        """
        code, details = _now(self.under.code()), _now(self.under.details()) or ""
        if self._end is None and (code, details) != _FAILED_WRITE:
            self._end = code, details, _now(self.under.trailing_metadata())

    async def _error(self) -> errors.ParamServerError:
        for _ in range(_STATUS_POLLS):
            self._note_end()
            if self._end is not None:
                break
            await asyncio.sleep(_STATUS_POLL_S)
        else:
            return unavailable(self._where, "the connection was lost")
        code, details, metadata = self._end
        for key, value in metadata or ():
            if key == ERROR_KEY:
                self._channel.heard = True
                error = remote_error(value if isinstance(value, str) else value.decode("ascii", "replace"), details)
                return self._denied() if isinstance(error, errors.DeniedError) and details == DENIED else error
        if details == DENIED:
            return self._denied()
        return from_code(code, details, self._where, self._timeout, self._hint(details))

    def _denied(self) -> errors.DeniedError:
        return denied(self._where, self._channel.security.lacking(self._method.name))

    def _hint(self, details: str) -> str:
        certificates = self._channel.security.certificates
        complaint = "" if certificates is None else certificates.dates_complaint()
        return complaint or connection_hint(details, certificates is not None, self._channel.heard)


class _Writer:
    """Sends one frame of a call while its user makes the next one."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._writing: asyncio.Task[bool] | None = None

    async def __aenter__(self) -> _Writer:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None:  # the user gives up, or failed
            self._writing.cancel()
            await asyncio.wait([self._writing])
            failure(self._writing)

    async def write(self, raw: bytes) -> bool:
        """Begin to send a frame, when there is room for the previous frame. False if the call has ended already."""
        if not await self.flush():
            return False
        if len(raw) < _SMALL_BYTES:  # gone before the next one is made
            return await self._call.write(raw)
        self._writing = asyncio.get_running_loop().create_task(self._call.write(raw))
        await asyncio.sleep(0)  # lets it begin
        return True

    async def flush(self) -> bool:
        """Wait until there is room for the last one. False if the call has ended already."""
        writing, self._writing = self._writing, None
        return writing is None or await writing


def _now(answer: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        answer.close()
    raise AssertionError("it waits for something")
