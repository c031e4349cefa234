"""The transport between processes: grpc.aio, with raw bytes in its messages.

Frames pass as they are; other messages are encoded and decoded here, so that a malformed one is refused in our words.
Two things are added to what the protos say:

- an error's class travels in the trailing metadata, see `failures`;
- an upload ends with one empty message. gRPC reports the end of a stream of requests in the same way for a caller who
  is done and, for a moment, for one who died; the last message tells them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.transport import fork
from paramserver.transport.addresses import join, probe, target
from paramserver.transport.base import MAX_MESSAGE_BYTES, Method, MethodKind, find, frame, handlers
from paramserver.transport.failures import CODES, ERROR_KEY, answered, arrived, from_code, unavailable
from paramserver.transport.grpcio import grpc

T = TypeVar("T")

_END = b""
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# After a failed write, the status of the call arrives in a moment.
_STATUS_POLL_S = 0.01
_STATUS_POLLS = 200
# How long `stop` waits for services that were cancelled.
STOP_S = 10.0
_FAILED_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")

_BOTH = (
    # Room for what is over our own limit by a little, which we refuse in our own words.
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + 1024),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + 1024),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    ("grpc.per_message_decompression", 0),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_CLIENT = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that comes back is found again within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
_SERVER = (
    *_BOTH,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)


# ---- server


class GrpcServer:
    """Services behind one listening port. Made by `serve`."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int, running: set[asyncio.Task[Any]]) -> None:
        self.port = port
        self.address = join(host, port)
        self._server = server
        self._loop = asyncio.get_running_loop()  # must live in forked children, too
        self._running = running
        fork.keep(self)

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more calls, give those in flight ``grace`` seconds, then cancel them and wait for their end."""
        fork.check()
        await self._server.stop(grace)
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=STOP_S)


async def serve(services: Sequence[tuple[str, object]], host: str = "127.0.0.1", port: int = 0) -> GrpcServer:
    """Answer calls on ``host`` (an address or name of this machine, "0.0.0.0" or "::" for all) and ``port`` (0: any).

    ``services`` are pairs of "Shard" or "Coordinator" and an object; see `base`. Raises ConfigError if the port is in
    use or cannot be listened on.
    """
    fork.check()
    await probe(host, port)
    server = grpc.aio.server(options=_SERVER, compression=grpc.Compression.NoCompression)
    running: set[asyncio.Task[Any]] = set()
    tables: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {}
    for method, handler in handlers(services):
        _, service, name = method.path.split("/")
        tables.setdefault(service, {})[name] = _HANDLERS[method.kind](method, handler, running)
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, table) for service, table in tables.items())
    )
    try:
        bound = server.add_insecure_port(join(host, port))
    except RuntimeError as error:
        raise errors.ConfigError(f"cannot listen on port {port} of {host}: choose another port or host") from error
    await server.start()
    return GrpcServer(server, host, bound, running)


Context = grpc.aio.ServicerContext[bytes, bytes]


async def _serve(
    method: Method, context: Context, running: set[asyncio.Task[Any]], work: Callable[[], Awaitable[T]]
) -> T:
    """Do the work for one call, and send the error that ends it."""
    task = asyncio.current_task()
    assert task is not None
    running.add(task)
    try:
        return await answered(method.name, work)
    except errors.ParamServerError as error:
        kind = type(error)
        await context.abort(CODES[kind], str(error), trailing_metadata=((ERROR_KEY, kind.__name__),))
    finally:
        running.discard(task)


def _unary(method: Method, handler: Any, running: set[asyncio.Task[Any]]) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def answer(raw: bytes, context: Context) -> bytes:
        async def work() -> bytes:
            return method.encode_response(await handler(method.decode_request(raw)))

        return await _serve(method, context, running, work)

    return grpc.unary_unary_rpc_method_handler(answer)


def _upload(method: Method, handler: Any, running: set[asyncio.Task[Any]]) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def answer(requests: AsyncIterator[bytes], context: Context) -> bytes:
        async def frames() -> AsyncIterator[bytes]:
            async for raw in requests:
                if raw == _END:
                    return
                yield raw
            raise errors.UnavailableError(f"{method.name}: the sender went away in the middle of the stream")

        async def work() -> bytes:
            return method.encode_response(await handler(frames()))

        return await _serve(method, context, running, work)

    return grpc.stream_unary_rpc_method_handler(answer)


def _download(method: Method, handler: Any, running: set[asyncio.Task[Any]]) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def answer(raw: bytes, context: Context) -> None:
        async def work() -> None:
            async with aclosing(handler(method.decode_request(raw))) as answers:
                async for item in answers:
                    await context.write(frame(method, item))

        await _serve(method, context, running, work)

    return grpc.unary_stream_rpc_method_handler(answer)


def _session(method: Method, handler: Any, running: set[asyncio.Task[Any]]) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
        async def parsed() -> AsyncIterator[Message]:
            async for raw in requests:
                yield method.decode_request(raw)

        async def work() -> None:
            async with aclosing(handler(parsed())) as answers:
                async for item in answers:
                    await context.write(method.encode_response(item))

        await _serve(method, context, running, work)

    return grpc.stream_stream_rpc_method_handler(answer)


_HANDLERS: dict[MethodKind, Callable[[Method, Any, set[asyncio.Task[Any]]], grpc.RpcMethodHandler[bytes, bytes]]] = {
    MethodKind.UNARY: _unary,
    MethodKind.UPLOAD: _upload,
    MethodKind.DOWNLOAD: _download,
    MethodKind.SESSION: _session,
}


# ---- client


def connect(address: str) -> GrpcChannel:
    """A channel to "host:port" or "[::1]:port". It connects at the first call and belongs to the loop that makes it.

    Raises ConfigError if that is no address.
    """
    return GrpcChannel(address)


class GrpcChannel:
    """See `base.Channel`."""

    kind = "grpc"

    def __init__(self, address: str) -> None:
        self.address = address
        self._target = target(address)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._multicallables: dict[str, Any] = {}
        self.calls: set[_Call] = set()
        self.closed = False
        fork.keep(self)

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UNARY)
        raw = found.encode_request(request)
        with _Call(self, found, timeout, self._begin(found)(raw, timeout=timeout)) as call:
            return found.decode_response(await call.step(call.under))

    async def upload(self, method: str, frames: Iterable[bytes], *, timeout: float) -> Message:
        """See `base.Channel`."""
        found = find(method, MethodKind.UPLOAD)
        with _Call(self, found, timeout, self._begin(found)(timeout=timeout)) as call:
            for raw in frames:
                if not await call.write(frame(found, raw)):
                    break
            else:
                if await call.write(_END):
                    await call.step(call.under.done_writing())
            return found.decode_response(await call.step(call.under))

    async def download(self, method: str, request: Message, *, timeout: float) -> AsyncGenerator[bytes, None]:
        """See `base.Channel`."""
        found = find(method, MethodKind.DOWNLOAD)
        raw = found.encode_request(request)
        with _Call(self, found, timeout, self._begin(found)(raw, timeout=timeout)) as call:
            while (item := await call.step(call.under.read())) is not grpc.aio.EOF:
                yield item

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`."""
        found = find(method, MethodKind.SESSION)
        with _Call(self, found, 0.0, self._begin(found)()) as call:

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
                failure = _failure(sender)
                if failure is not None:
                    raise failure from None
                raise
            finally:
                sender.cancel()
                await asyncio.wait([sender])
                _failure(sender)

    async def close(self) -> None:
        """See `base.Channel`."""
        fork.check()
        self.closed = True
        self._multicallables.clear()
        for call in list(self.calls):
            call.under.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _begin(self, method: Method) -> Any:
        """gRPC's callable that starts a call."""
        fork.check()
        if self.closed:
            raise unavailable(f"{method.name} at {self.address}", "this channel is closed")
        if self._channel is None:
            self._loop = asyncio.get_running_loop()
            self._channel = grpc.aio.insecure_channel(
                self._target, options=_CLIENT, compression=grpc.Compression.NoCompression
            )
        if method.name not in self._multicallables:
            channel = self._channel
            make: Any = {
                MethodKind.UNARY: channel.unary_unary,
                MethodKind.UPLOAD: channel.stream_unary,
                MethodKind.DOWNLOAD: channel.unary_stream,
                MethodKind.SESSION: channel.stream_stream,
            }[method.kind]
            self._multicallables[method.name] = make(method.path)
        return self._multicallables[method.name]


class _Call:
    """One call of gRPC, ``under``, whose errors become ours. Leaving the context cancels what is left of it."""

    def __init__(self, channel: GrpcChannel, method: Method, timeout: float, under: Any) -> None:
        self._channel = channel
        self._where = f"{method.name} at {channel.address}"
        self._timeout = timeout
        self.under = under
        self._end: tuple[grpc.StatusCode, str, Any] | None = None
        under.add_done_callback(self._note_end)

    def __enter__(self) -> _Call:
        self._channel.calls.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.calls.discard(self)
        self.under.cancel()

    async def write(self, raw: bytes) -> bool:
        """Send a message when there is room. False if the call has ended already; how, the next `step` tells."""
        try:
            await self._cancellable(self.under.write(raw))
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return False
        return True

    async def step(self, step: Awaitable[Any]) -> Any:
        """Wait for something that the call does."""
        try:
            return await self._cancellable(step)
        except grpc.aio.AioRpcError as error:
            raise await self._error() from error

    async def _cancellable(self, step: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await step
        except asyncio.CancelledError:
            if task.cancelling() > before:
                self.under.cancel()
                raise
            # Not we were cancelled, but the call: by the peer, or since this channel was closed.
            reason = "this channel is closed" if self._channel.closed else "it stopped or closed the connection"
            raise unavailable(self._where, reason) from None

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
                return arrived(value if isinstance(value, str) else value.decode("ascii", "replace"), details)
        return from_code(code, details, self._where, self._timeout)


def _now(answer: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        answer.close()
    raise AssertionError("it waits for something")


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
