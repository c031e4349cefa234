"""What only the gRPC transport has: addresses, proxies, peers that are none of ours, processes that die or fork."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paramserver import errors
from paramserver.transport.grpc import GrpcChannel, connect, serve
from paramserver.transport.grpcio import grpc
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.worker.background import Background
from tests.support.contract.channels import DEADLINE_S, GrpcWires, Parked, Stub, echo, run, spawn
from tests.support.contract.requests import ASK, PULL, PUSH, STATUS, WANT, T, collect, reporting

HERE = Path(__file__)
ROOT = HERE.parents[2]


def has_ipv6() -> bool:
    """Whether this machine has ::1."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", "localhost", "0.0.0.0", *(["::1", "::"] if has_ipv6() else [])]


# ---- addresses


@pytest.mark.parametrize("host", HOSTS)
def test_every_kind_of_host_can_be_served_and_reached(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment, where nobody answers, changes nothing."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    async def test(w: GrpcWires) -> None:
        server = await serve([("Coordinator", Stub(status=echo))], host, security=Security.open(insecure=True))
        w.opened.append(server)
        assert server.port > 0
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)
        address = f"{reachable}:{server.port}" if reachable else server.address
        assert await w.connect(address).call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


@pytest.mark.parametrize("host", HOSTS)
def test_a_port_in_use_is_named(host: str) -> None:
    async def main() -> None:
        anywhere = Security.open(insecure=True)
        server = await serve([("Coordinator", Stub())], host, security=anywhere)
        try:
            with pytest.raises(errors.ConfigError, match=f"port {server.port} on {host} is in use"):
                await serve([("Coordinator", Stub())], host, server.port, anywhere)
        finally:
            await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 64 + ".b"])
def test_a_host_of_somebody_else_is_named(host: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"cannot listen on .*{host}"):
        asyncio.run(serve([("Coordinator", Stub())], host))


def test_a_host_name_that_nobody_knows_is_unavailable() -> None:
    async def test(w: GrpcWires) -> None:
        with pytest.raises(errors.UnavailableError, match=r"Coordinator\.Status at no-such-host\.invalid:1"):
            await w.connect("no-such-host.invalid:1").call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


# ---- one connection


def connections(port: int) -> int:
    """How many connections of this machine to this port are open."""
    texts = [path.read_text() for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    return sum(line[2].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


def test_all_calls_of_a_channel_share_one_connection() -> None:
    """The connection ends with the channel."""

    async def push(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        return shard_pb2.PushResponse(version=sum([len(frame) async for frame in frames]))

    async def pull(_: object) -> AsyncIterator[bytes]:
        yield b"frame"

    async def test(w: GrpcWires) -> None:
        server = await serve([("Shard", Stub(push=push, pull=pull)), ("Coordinator", Stub(status=echo))])
        w.opened.append(server)
        channel = connect(server.address)
        w.opened.append(channel)
        for _ in range(2):
            assert await channel.upload(PUSH, [b"frame"], timeout=T) == shard_pb2.PushResponse(version=5)
        assert await collect(channel) == [b"frame"]
        assert await channel.call(STATUS, ASK, timeout=T)
        assert connections(server.port) == 1
        await channel.close()
        with pytest.raises(errors.UnavailableError, match="this channel is closed"):
            await collect(channel)

    run(GrpcWires, test)


# ---- others on the wire


def test_stock_grpc_sees_code_text_and_class() -> None:
    async def status(_: object) -> coordinator_pb2.StatusResponse:
        raise errors.GoneError("größer")

    async def test(w: GrpcWires) -> None:
        server = await w.serve(("Coordinator", Stub(status=status)))
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.unary_unary("/paramserver.v1.CoordinatorService/Status")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=T)
            assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert caught.value.details() == "größer"
            assert ("paramserver-error", "GoneError") in list(caught.value.trailing_metadata())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff\xff", timeout=T)
            assert caught.value.details() == "Coordinator.Status: 2 bytes that are no StatusRequest"

    run(GrpcWires, test)


def test_an_upload_without_its_last_empty_frame_never_ends_normally() -> None:
    async def test(w: GrpcWires) -> None:
        ended: asyncio.Queue[str] = asyncio.Queue()
        server = await w.serve(("Shard", Stub(push=reporting(ended, asyncio.Event()))))
        async with grpc.aio.insecure_channel(server.address) as channel:
            push: Any = channel.stream_unary("/paramserver.v1.ShardService/Push")
            with pytest.raises(grpc.aio.AioRpcError, match="went away in the middle of the stream"):
                await push(iter([b"one", b"two"]), timeout=T)
            assert await ended.get() == "UnavailableError"
            assert await push(iter([b"one", b"two", b""]), timeout=T) == b""
            assert await ended.get() == "normally"

    run(GrpcWires, test)


def test_a_peer_with_a_smaller_limit_is_one_clear_sentence() -> None:
    """A foreign server takes 1000 bytes at most."""

    async def test(w: GrpcWires) -> None:
        async def status(raw: bytes, _: object) -> bytes:
            return raw

        foreign = grpc.aio.server(options=[("grpc.max_receive_message_length", 1000)])
        handler: Any = grpc.unary_unary_rpc_method_handler(status)
        foreign.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("paramserver.v1.CoordinatorService", {"Join": handler}),)
        )
        port = foreign.add_insecure_port("127.0.0.1:0")
        await foreign.start()
        try:
            with pytest.raises(errors.ProtocolError, match="a message of 2003 bytes is over the limit of 1000 bytes"):
                await w.connect(f"127.0.0.1:{port}").call(
                    "Coordinator.Join", coordinator_pb2.JoinRequest(job="x" * 2000), timeout=T
                )
        finally:
            await foreign.stop(0)

    run(GrpcWires, test)


def test_something_that_is_no_grpc_server_is_unavailable() -> None:
    async def test(w: GrpcWires) -> None:
        async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        web = await asyncio.start_server(page, "127.0.0.1", 0)
        async with web:
            port = web.sockets[0].getsockname()[1]
            with pytest.raises(errors.UnavailableError):
                await w.connect(f"127.0.0.1:{port}").call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


@pytest.mark.parametrize("steps", range(6))
def test_a_channel_that_is_closed_while_it_connects_ends_an_upload(steps: int) -> None:
    """The peer takes the connection and says nothing, as a server that is about to die."""

    async def test(w: GrpcWires) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            channel = w.connect(f"127.0.0.1:{mute.getsockname()[1]}")
            upload = asyncio.ensure_future(channel.upload(PUSH, [b"frame"], timeout=600.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            await channel.close()
            with pytest.raises(errors.UnavailableError, match="closed"):
                await asyncio.wait_for(upload, T)

    run(GrpcWires, test)


@pytest.mark.parametrize("frames", [1, 40])
def test_a_channel_that_is_closed_ends_an_upload_that_the_connection_does_not_take(frames: int) -> None:
    """The peer is cut off. gRPC would wake the writer when the connection is given up, after many seconds."""

    class Deaf:
        """A connection that takes no bytes."""

        def __init__(self) -> None:
            self.writing, self.written = asyncio.Event(), 0

        async def write(self, _: bytes) -> None:
            self.written += 1
            if self.written == frames:
                self.writing.set()
                await asyncio.Event().wait()

    async def test(w: GrpcWires) -> None:
        server = await w.serve(("Shard", Stub(push=reporting(asyncio.Queue(), asyncio.Event()))))
        channel, deaf = w.connect(server.address), Deaf()
        calls: Any = type(grpc.aio.insecure_channel(server.address).stream_unary("/x")())
        with mock.patch.object(calls, "write", lambda _, raw: deaf.write(raw)):
            upload = asyncio.ensure_future(channel.upload(PUSH, itertools.repeat(b"frame"), timeout=600.0))
            await deaf.writing.wait()
            await channel.close()
            with pytest.raises(errors.UnavailableError, match="closed"):
                await asyncio.wait_for(upload, T)

    run(GrpcWires, test)


@pytest.mark.parametrize("closes", [False, True])
def test_whoever_cancels_an_upload_is_heard(closes: bool) -> None:
    """Also if the channel is closed at the same moment."""

    async def test(w: GrpcWires) -> None:
        arrived = asyncio.Event()
        server = await w.serve(("Shard", Stub(push=reporting(asyncio.Queue(), arrived))))
        channel = w.connect(server.address)
        upload = asyncio.ensure_future(channel.upload(PUSH, itertools.repeat(bytes(1000)), timeout=600.0))
        await arrived.wait()
        upload.cancel()
        if closes:
            await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert upload.cancelled()

    run(GrpcWires, test)


# ---- processes


async def child(*argv: str) -> asyncio.subprocess.Process:
    """A Python process with a pipe to read from."""
    return await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT)


UPLOADER = """
import asyncio, sys
from paramserver.transport.grpc import connect

def frames():
    while True:
        yield bytes(2**20)

asyncio.run(connect(sys.argv[1]).upload("Shard.Push", frames(), timeout=60))
"""


def test_a_sender_killed_in_an_upload_never_ends_it_normally() -> None:
    async def test(w: GrpcWires) -> None:
        ended: asyncio.Queue[str] = asyncio.Queue()
        arrived = asyncio.Event()
        server = await w.serve(("Shard", Stub(push=reporting(ended, arrived))))
        process = await child("-c", UPLOADER, server.address)
        await arrived.wait()
        process.kill()
        assert await ended.get() in ("CancelledError", "UnavailableError")
        await process.communicate()

    run(GrpcWires, test)


SERVER = """
import asyncio
from tests.support.contract.channels import Parked, Stub, echo
from paramserver.transport.grpc import serve

async def main():
    parked = Parked()
    shard = Stub(push=parked.upload, pull=parked.download)
    server = await serve([("Shard", shard), ("Coordinator", Stub(status=echo))])
    print(server.address, flush=True)
    await parked.until(lambda: parked.arrived == 2)
    print("parked", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_server_ends_all_calls_as_unavailable() -> None:
    async def test(w: GrpcWires) -> None:
        process = await child("-c", SERVER)
        assert process.stdout is not None
        channel = w.connect((await process.stdout.readline()).decode().strip())
        calls = [
            spawn(channel.upload(PUSH, (bytes(2**20) for _ in range(1000)), timeout=T)),
            spawn(collect(channel)),
        ]
        assert await process.stdout.readline() == b"parked\n"
        assert await channel.call(STATUS, ASK, timeout=T)
        process.kill()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, errors.UnavailableError), result
        with pytest.raises(errors.UnavailableError, match="nobody answers"):
            await channel.call(STATUS, ASK, timeout=T)
        await process.communicate()

    run(GrpcWires, test)


@pytest.mark.parametrize("how", ["_exit", "exit", "multiprocessing"])
def test_forked_children_refuse_to_call_and_end_cleanly(how: str) -> None:
    """With a call parked and others running; the parent goes on. See forking.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.contract.forking", how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_grpc_imported_first_is_a_warning() -> None:
    argv = [sys.executable, "-c", "import grpc, paramserver.transport.grpc"]

    def said(**environment: str) -> str:
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stderr

    assert "set GRPC_ENABLE_FORK_SUPPORT=0 in the environment" in said()
    assert said(GRPC_ENABLE_FORK_SUPPORT="0") == ""


# ---- nothing on the log


def test_the_usual_ends_of_calls_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Cancelled calls, passed deadlines and refused pushes are everyday life."""

    async def pull(_: object) -> AsyncIterator[bytes]:
        yield b"x"
        raise errors.GoneError("text")

    async def push(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        raise errors.FencedError("text")

    async def test(w: GrpcWires) -> None:
        parked = Parked()
        server = await w.serve(("Shard", Stub(pull=pull, push=push)), ("Coordinator", Stub(status=parked.unary)))
        channel = connect(server.address)
        with pytest.raises(errors.GoneError):
            await collect(channel)
        with pytest.raises(errors.FencedError):
            await channel.upload(PUSH, [b"x"] * 10, timeout=T)
        with pytest.raises(errors.DeadlineError):
            await channel.call(STATUS, ASK, timeout=0.1)
        call = spawn(channel.call(STATUS, ASK, timeout=T))
        await parked.until(lambda: parked.arrived == 2)
        call.cancel()
        await parked.until(lambda: parked.left == 2)
        async for _ in channel.download(PULL, WANT, timeout=T):
            break
        await channel.close()

    with caplog.at_level(logging.INFO):
        run(GrpcWires, test)
    assert [record.getMessage() for record in caplog.records] == []


def test_a_caller_whose_interpreter_hung_while_the_session_ended_is_told_so() -> None:
    """A worker that hangs, is given up for lost meanwhile, and comes back: it writes before it reads the end."""
    background = Background("server")
    ended = threading.Event()

    async def session(asked: AsyncIterator[Any]) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        await anext(aiter(asked))
        yield coordinator_pb2.SessionResponse()
        await asyncio.sleep(0.05)
        ended.set()

    async def talk(channel: GrpcChannel) -> int:
        heard = asyncio.Event()

        async def reports() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            yield coordinator_pb2.SessionRequest()
            await heard.wait()
            assert ended.wait(DEADLINE_S)
            time.sleep(0.2)  # the end has arrived, and this loop has not looked yet
            while True:
                yield coordinator_pb2.SessionRequest()

        replies = 0
        async for _ in channel.session("Coordinator.Session", reports()):
            replies += 1
            heard.set()
        return replies

    async def main(address: str) -> int | errors.ParamServerError:
        channel = connect(address)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await talk(channel)
        except errors.ParamServerError as error:
            return error
        finally:
            await channel.close()

    server = background.run(serve([("Coordinator", Stub(session=session))], "127.0.0.1", 0))
    try:
        outcome = asyncio.run(main(server.address))
    finally:
        background.run(server.stop())
        background.close()
    assert outcome == 1 or isinstance(outcome, errors.UnavailableError), repr(outcome)
