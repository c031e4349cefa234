"""The called side of the transport between processes; see `grpc`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.transport import fork
from paramserver.transport.addresses import join, probe
from paramserver.transport.base import Method, MethodKind, frame, handlers, set_caller
from paramserver.transport.failures import CODES, ERROR_KEY, answered
from paramserver.transport.grpcio import grpc
from paramserver.transport.limits import LIMITS, Limits
from paramserver.transport.security.access import DENIED, OPEN, Refusal, RefusalLog, Security

T = TypeVar("T")

# What an upload ends with.
END = b""
# How long `stop` waits for services that were cancelled.
STOP_S = 10.0


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
    await probe(host, port)
    await security.check_listen(host)
    server = grpc.aio.server(
        options=limits.server(),
        compression=grpc.Compression.NoCompression,
    )
    running: set[asyncio.Task[Any]] = set()
    server.add_generic_rpc_handlers((_Door(services, security, running, limits.calls),))
    address = join(host, port)
    try:
        if security.certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, security.certificates.server_credentials())
    except RuntimeError as error:
        raise errors.ConfigError(f"cannot listen on port {port} of {host}: choose another port or host") from error
    await server.start()
    return GrpcServer(server, host, bound, running)


class _Door(grpc.GenericRpcHandler):
    """Finds what answers a call, once the tokens in its head have been checked and there is room for it."""

    def __init__(
        self, services: Sequence[tuple[str, object]], security: Security, running: set[asyncio.Task[Any]], limit: int
    ) -> None:
        self._security = security
        # gRPC has a limit of its own, which some versions do not keep.
        self._running, self._limit = running, limit
        self._refusals = RefusalLog()
        self._methods = {
            method.path: (method, _HANDLERS[method.kind](self._answering(method), handler))
            for method, handler in handlers(services)
        }

    def service(self, details: Any) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """gRPC's question, before the body of the call is read. None: no such method."""
        found = self._methods.get(details.method)
        if found is None:
            return None
        method, answer = found
        refusal = self._security.admit(method.name, details.invocation_metadata)
        if refusal is not None:
            return _refusing(method, refusal, self._refusals)
        return answer if len(self._running) < self._room(method) else _busy(self._limit)

    def _answering(self, method: Method) -> _Answering:
        return _Answering(method, self._security, self._running, self._refusals, self._room(method))

    def _room(self, method: Method) -> int:
        """A member can say that it lives although there is no room for other calls."""
        return 2 * self._limit if method.kind is MethodKind.SESSION else self._limit


async def _turn_away(limit: int, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{limit} calls are being answered already")


def _busy(limit: int) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def answer(_: AsyncIterator[bytes], context: Context) -> None:
        await _turn_away(limit, context)

    return grpc.stream_stream_rpc_method_handler(answer)


def _refusing(method: Method, refusal: Refusal, refusals: RefusalLog) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Whatever the kind of the method, nothing of the body is taken."""

    async def answer(_: AsyncIterator[bytes], context: Context) -> None:
        await _refuse(method, refusal, refusals, context)

    return grpc.stream_stream_rpc_method_handler(answer)


async def _refuse(method: Method, refusal: Refusal, refusals: RefusalLog, context: Context) -> NoReturn:
    refusals.say(method.name, context.peer(), refusal.reason)
    code = grpc.StatusCode.UNAUTHENTICATED if refusal.unknown else grpc.StatusCode.PERMISSION_DENIED
    await context.abort(code, DENIED)


Context = grpc.aio.ServicerContext[bytes, bytes]


class _Answering:
    """What all calls of one method have in common."""

    def __init__(
        self, method: Method, security: Security, running: set[asyncio.Task[Any]], refusals: RefusalLog, limit: int
    ) -> None:
        self.method = method
        self._security = security
        self._running, self._limit = running, limit
        self._refusals = refusals

    async def run(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work for one call if its caller may ask for it, and send the error that ends it."""
        caller = self._security.identify(self.method.name, context.auth_context)
        if isinstance(caller, Refusal):
            await _refuse(self.method, caller, self._refusals, context)
        set_caller(caller)
        if len(self._running) >= self._limit:  # many heads may have come before the first call of them began
            await _turn_away(self._limit, context)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await answered(self.method.name, work)
        except errors.ParamServerError as error:
            kind = type(error)
            await context.abort(CODES[kind], str(error), trailing_metadata=((ERROR_KEY, kind.__name__),))
        finally:
            self._running.discard(task)


async def _write(context: Context, message: bytes) -> None:
    """Send one message of an answer. Raises UnavailableError if the caller has gone away."""
    try:
        await context.write(message)
    except Exception as error:  # gRPC has several, none of them public
        raise errors.UnavailableError("the caller went away in the middle of the answer") from error


def _unary(answering: _Answering, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = answering.method

    async def answer(raw: bytes, context: Context) -> bytes:
        async def work() -> bytes:
            return method.encode_response(await handler(method.decode_request(raw)))

        return await answering.run(context, work)

    return grpc.unary_unary_rpc_method_handler(answer)


def _upload(answering: _Answering, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = answering.method

    async def answer(requests: AsyncIterator[bytes], context: Context) -> bytes:
        async def frames() -> AsyncIterator[bytes]:
            async for raw in requests:
                if raw == END:
                    return
                yield raw
            raise errors.UnavailableError(f"{method.name}: the sender went away in the middle of the stream")

        async def work() -> bytes:
            return method.encode_response(await handler(frames()))

        return await answering.run(context, work)

    return grpc.stream_unary_rpc_method_handler(answer)


def _download(answering: _Answering, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = answering.method

    async def answer(raw: bytes, context: Context) -> None:
        async def work() -> None:
            async with aclosing(handler(method.decode_request(raw))) as answers:
                async for item in answers:
                    await _write(context, frame(method, item))

        await answering.run(context, work)

    return grpc.unary_stream_rpc_method_handler(answer)


def _session(answering: _Answering, handler: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = answering.method

    async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
        async def parsed() -> AsyncIterator[Message]:
            async for raw in requests:
                yield method.decode_request(raw)

        async def work() -> None:
            async with aclosing(handler(parsed())) as answers:
                async for item in answers:
                    await _write(context, method.encode_response(item))

        await answering.run(context, work)

    return grpc.stream_stream_rpc_method_handler(answer)


_HANDLERS: dict[MethodKind, Callable[[_Answering, Any], grpc.RpcMethodHandler[bytes, bytes]]] = {
    MethodKind.UNARY: _unary,
    MethodKind.UPLOAD: _upload,
    MethodKind.DOWNLOAD: _download,
    MethodKind.SESSION: _session,
}
