"""The called side of the transport between processes; see `grpc`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from paramserver import errors
from paramserver.transport import fork
from paramserver.transport.addresses import join, probe
from paramserver.transport.base import (
    Method,
    MethodKind,
    answer,
    frame,
    handlers,
    reply,
    set_addressed,
    set_caller,
    set_host,
)
from paramserver.transport.failures import CODES, ERROR_KEY, answered
from paramserver.transport.grpc.watch import Watch
from paramserver.transport.grpcio import grpc
from paramserver.transport.limits import LIMITS, Limits, raise_files
from paramserver.transport.security.access import DENIED, OPEN, Refusal, RefusalLog, Security

T = TypeVar("T")

# What an upload ends with.
END = b""
# The entry in the head of a call that names a shard.
SHARD_KEY = "paramserver-shard"
# How long `stop` waits for services that were cancelled.
STOP_S = 10.0


class GrpcServer:
    """Services behind one listening port. Made by `serve`."""

    def __init__(
        self, server: grpc.aio.Server, host: str, port: int, running: set[asyncio.Task[Any]], watch: Watch
    ) -> None:
        self.port = port
        self.address = join(host, port)
        self._server = server
        self._loop = asyncio.get_running_loop()  # must live in forked children, too
        self._running = running
        self._watching = self._loop.create_task(watch.run())
        fork.keep(self)

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more calls, give those in flight ``grace`` seconds, then cancel them and wait for their end."""
        fork.check()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._server.stop(grace)
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=STOP_S)


async def serve(
    services: Sequence[tuple[str, object]],
    host: str = "127.0.0.1",
    port: int = 0,
    security: Security = OPEN,
    limits: Limits = LIMITS,
) -> GrpcServer:
    """Answer calls on ``host`` (an address or name of this machine, "0.0.0.0" or "::" for all) and ``port`` (0: any).

    ``services`` are pairs of "Shard" or "Coordinator" and an object; see `base`. Raises ConfigError if the port is in
    use or cannot be listened on, or if that is not safe with this ``security``.
    """
    fork.check()
    raise_files()
    await probe(host, port)
    await security.check_listen(host)
    server = grpc.aio.server(
        options=limits.server(),
        compression=grpc.Compression.NoCompression,
    )
    running: set[asyncio.Task[Any]] = set()
    refusals = RefusalLog()
    watch = Watch(limits.incoming() // 4, refusals)
    server.add_generic_rpc_handlers((_Door(services, security, running, limits.calls, watch, refusals),))
    address = join(host, port)
    try:
        if security.certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, security.certificates.server_credentials())
    except RuntimeError as error:
        raise errors.ConfigError(f"cannot listen on port {port} of {host}: choose another port or host") from error
    watch.port = bound
    await server.start()
    return GrpcServer(server, host, bound, running, watch)


Context = grpc.aio.ServicerContext[bytes, bytes]


class _Door(grpc.GenericRpcHandler):
    """Finds what answers a call, once the tokens in its head have been checked and there is room for it."""

    def __init__(
        self,
        services: Sequence[tuple[str, object]],
        security: Security,
        running: set[asyncio.Task[Any]],
        limit: int,
        watch: Watch,
        refusals: RefusalLog,
    ) -> None:
        self._security, self._watch, self._refusals = security, watch, refusals
        # gRPC has a limit of its own, which some versions do not keep.
        self._running, self._limit = running, limit
        self._methods = {
            method.path: (method, _HANDLERS[method.kind](self, method, handler))
            for method, handler in handlers(services)
        }

    def service(self, details: Any) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """gRPC's question, before the body of the call is read. None: no such method."""
        found = self._methods.get(details.method)
        if found is None:
            return None
        method, handler = found
        refusal = self._security.admit(method.name, details.invocation_metadata)
        if refusal is None and self._has_room(method):
            return handler

        async def turn_away(_: AsyncIterator[bytes], context: Context) -> None:
            await self._turn_away(method, refusal, context)

        return grpc.stream_stream_rpc_method_handler(turn_away)  # of any kind of method, nothing of the body is taken

    async def run(self, method: Method, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work for one call if its caller may ask for it, and send the error that ends it."""
        head = tuple(context.invocation_metadata() or ())
        caller = self._security.identify(method.name, context.auth_context, head)
        if isinstance(caller, Refusal):
            await self._turn_away(method, caller, context)
        if not self._has_room(method):  # many heads may have come before the first call of them began
            await self._turn_away(method, None, context)
        set_caller(caller)
        set_host(self._watch.known(context.peer()))
        set_addressed(_shard_in(context))
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await answered(method.name, work)
        except errors.ParamServerError as error:
            kind = type(error)
            await context.abort(CODES[kind], str(error), trailing_metadata=((ERROR_KEY, kind.__name__),))
        finally:
            self._running.discard(task)

    async def _turn_away(self, method: Method, refusal: Refusal | None, context: Context) -> NoReturn:
        """End a call that does not begin. ``refusal``: None if there is no room for the call."""
        if refusal is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._limit} calls are being answered already")
        self._refusals.say(method.name, context.peer(), refusal.reason)
        code = grpc.StatusCode.UNAUTHENTICATED if refusal.unknown else grpc.StatusCode.PERMISSION_DENIED
        await context.abort(code, DENIED)

    def _has_room(self, method: Method) -> bool:
        """A member can say that it lives although there is no room for other calls."""
        return len(self._running) < (2 * self._limit if method.kind is MethodKind.SESSION else self._limit)


def _shard_in(context: Context) -> int | None:
    """The number of the shard that the head of a call names; None if it names none, or no number."""
    for key, value in context.invocation_metadata() or ():
        if key == SHARD_KEY and isinstance(value, str) and value.isascii() and value.isdecimal():
            return int(value[:9])
    return None


async def _write(context: Context, message: bytes) -> None:
    """Send one message of an answer. Raises UnavailableError if the caller has gone away."""
    try:
        await context.write(message)
    except Exception as error:  # gRPC has several, none of them public
        raise errors.UnavailableError("the caller went away in the middle of the answer") from error


async def _frames(method: Method, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for raw in requests:
        if raw == END:
            return
        yield raw
    raise errors.UnavailableError(f"{method.name}: the sender went away in the middle of the stream")


def _unary(door: _Door, method: Method, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def unary(raw: bytes, context: Context) -> bytes:
        return await door.run(method, context, lambda: reply(method, handler, raw))

    return grpc.unary_unary_rpc_method_handler(unary)


def _upload(door: _Door, method: Method, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def upload(requests: AsyncIterator[bytes], context: Context) -> bytes:
        return await door.run(method, context, lambda: reply(method, handler, _frames(method, requests)))

    return grpc.stream_unary_rpc_method_handler(upload)


def _download(door: _Door, method: Method, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def download(raw: bytes, context: Context) -> None:
        await door.run(method, context, lambda: answer(method, handler, raw, partial(_write, context), frame))

    return grpc.unary_stream_rpc_method_handler(download)


def _session(door: _Door, method: Method, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def session(requests: AsyncIterator[bytes], context: Context) -> None:
        await door.run(method, context, lambda: answer(method, handler, requests, partial(_write, context), frame))

    return grpc.stream_stream_rpc_method_handler(session)


_HANDLERS: dict[MethodKind, Callable[[_Door, Method, Any], grpc.RpcMethodHandler[bytes, bytes]]] = {
    MethodKind.UNARY: _unary,
    MethodKind.UPLOAD: _upload,
    MethodKind.DOWNLOAD: _download,
    MethodKind.SESSION: _session,
}
