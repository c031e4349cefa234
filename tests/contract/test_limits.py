"""What a peer may send, how much at once, and how its silence is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.transport.base import MAX_MESSAGE_BYTES
from paramserver.transport.grpc import connect, serve
from paramserver.transport.grpcio import grpc
from paramserver.transport.limits import LIMITS, Limits
from paramserver.v1 import coordinator_pb2
from tests.support.contract.channels import DEADLINE_S, GrpcWires, Parked, Stub, echo, run, spawn
from tests.support.contract.requests import ASK, MIB, PUSH, STATUS, T
from tests.support.contract.trust import JOIN, bearer, knock, plain

ROOT = Path(__file__).parents[2]
SETTINGS = "Coordinator.Settings"


async def settings(_: object) -> coordinator_pb2.SettingsResponse:
    return coordinator_pb2.SettingsResponse()


# ---- at once


def test_calls_over_the_limit_are_refused_at_once_and_the_others_live() -> None:
    async def test(w: GrpcWires) -> None:
        parked = Parked()
        services = [("Coordinator", Stub(status=parked.unary, settings=settings))]
        server = await serve(services, limits=Limits(calls=8))
        w.opened.append(server)
        channel = w.connect(server.address)
        calls = [spawn(channel.call(STATUS, ASK, timeout=T)) for _ in range(8)]
        await parked.until(lambda: parked.arrived == 8)
        for _ in range(50):
            with pytest.raises(errors.OverloadedError, match="slow down"):
                await channel.call(SETTINGS, coordinator_pb2.SettingsRequest(), timeout=T)
        assert parked.left == 0
        calls[0].cancel()
        await parked.until(lambda: parked.left == 1)
        await asyncio.wait_for(_answered(channel), T)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(GrpcWires, test)


async def _answered(channel: Any) -> None:
    """A place that has become free may be seen a moment later."""
    while True:
        try:
            await channel.call(SETTINGS, coordinator_pb2.SettingsRequest(), timeout=T)
            return
        except errors.OverloadedError:
            await asyncio.sleep(0.01)


def test_connections_over_the_limit_are_closed_and_the_others_live() -> None:
    async def test(w: GrpcWires) -> None:
        server = await serve([("Coordinator", Stub(status=echo))], limits=Limits(connections=2))
        w.opened.append(server)
        first, second, third = (w.connect(server.address) for _ in range(3))
        assert await first.call(STATUS, ASK, timeout=T)
        assert await second.call(STATUS, ASK, timeout=T)
        with pytest.raises(errors.UnavailableError):
            await third.call(STATUS, ASK, timeout=T)
        assert await first.call(STATUS, ASK, timeout=T)
        await second.close()
        while True:
            try:
                assert await third.call(STATUS, ASK, timeout=T)
                return
            except errors.UnavailableError:
                await asyncio.sleep(0.05)

    run(GrpcWires, test)


def test_strangers_who_stay_connected_give_way_to_members() -> None:
    """They say that they speak HTTP/2, and then nothing: more of them than the server takes connections."""

    async def test(w: GrpcWires) -> None:
        limits = Limits(connections=32)
        server = await serve([("Coordinator", Stub(status=echo))], security=plain([JOIN]), limits=limits)
        w.opened.append(server)
        member = connect(server.address, plain([JOIN]))
        w.opened.append(member)
        assert await member.call(STATUS, ASK, timeout=T)
        strangers = []
        for _ in range(64):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            strangers.append((reader, writer))
        late = connect(server.address, plain([JOIN]))
        w.opened.append(late)
        async with asyncio.timeout(T):
            while True:
                with contextlib.suppress(errors.UnavailableError):
                    assert await late.call(STATUS, ASK, timeout=T)
                    break
                await asyncio.sleep(0.05)
            assert await member.call(STATUS, ASK, timeout=T)
            for reader, _ in strangers[:16]:
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # the server has hung up
        for _, writer in strangers:
            writer.close()

    run(GrpcWires, test)


def test_one_connection_cannot_have_more_calls_than_its_limit() -> None:
    """Most of the excess waits with the caller; what overtakes the end of another call is refused, for a new try."""

    async def test(w: GrpcWires) -> None:
        present = most = 0

        async def status(_: object) -> coordinator_pb2.StatusResponse:
            nonlocal present, most
            present += 1
            most = max(most, present)
            await asyncio.sleep(0.01)
            present -= 1
            return coordinator_pb2.StatusResponse()

        server = await serve([("Coordinator", Stub(status=status))], limits=Limits(streams=4))
        w.opened.append(server)
        channel = w.connect(server.address)
        await channel.call(STATUS, ASK, timeout=T)  # the server's limit is known from the first answer on
        calls = (channel.call(STATUS, ASK, timeout=T) for _ in range(40))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} <= {coordinator_pb2.StatusResponse, errors.UnavailableError}
        assert sum(not isinstance(answer, Exception) for answer in answers) >= 4
        assert 1 < most <= 4

    run(GrpcWires, test)


def test_the_limits_leave_room_for_a_large_cluster() -> None:
    """A thousand workers: a connection, a session, a parked pull and pushes each."""
    assert LIMITS.connections >= 1000
    assert LIMITS.calls >= 1000 * 6
    assert LIMITS.streams >= 64


def test_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((256, 128), (1024, 512), (1 << 20, LIMITS.connections), (-1, LIMITS.connections)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert dict(LIMITS.server())["grpc.max_allowed_incoming_connections"] == most


# ---- sizes


def test_a_refused_caller_cannot_make_the_server_take_its_message() -> None:
    """Who has no token is answered before its message is read: a message that does not end does no harm."""

    async def test(w: GrpcWires) -> None:
        server = await serve([("Coordinator", Stub())], security=plain([JOIN]))
        w.opened.append(server)
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.stream_stream("/paramserver.v1.CoordinatorService/Join")(timeout=T)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()  # nothing has been sent yet
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(GrpcWires, test)


@pytest.mark.parametrize("token", [JOIN, "wrong"])
def test_too_much_metadata_or_message_is_refused(token: str) -> None:
    async def test(w: GrpcWires) -> None:
        server = await serve([("Coordinator", Stub(status=echo))], security=plain([JOIN]))
        w.opened.append(server)
        async with grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            code, details = await knock(channel, STATUS, (*bearer(token), ("x", "y" * 300_000)))
            assert (code, "metadata size" in details) == ("RESOURCE_EXHAUSTED", True)
            status: Any = channel.unary_unary("/paramserver.v1.CoordinatorService/Status")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status(bytes(MAX_MESSAGE_BYTES + MIB), metadata=bearer(token), timeout=T)
            codes = {JOIN: grpc.StatusCode.RESOURCE_EXHAUSTED, "wrong": grpc.StatusCode.UNAUTHENTICATED}
            assert caught.value.code() is codes[token]

    run(GrpcWires, test)


SERVER = """
import asyncio, sys
from tests.support.contract.channels import Stub, echo, swallow
from paramserver.transport.grpc import serve

async def main():
    server = await serve([("Coordinator", Stub(status=echo)), ("Shard", Stub(push=swallow))])
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()

asyncio.run(main())
"""


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.long
def test_a_compressed_message_is_refused_without_being_inflated() -> None:
    """256 MiB of zeros are a quarter of a MiB as gzip, well below every limit on what arrives."""
    inflated = 256 * MIB
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()

    async def main() -> None:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options, compression=grpc.Compression.Gzip) as channel:
            status: Any = channel.unary_unary("/paramserver.v1.CoordinatorService/Status")
            push: Any = channel.stream_unary("/paramserver.v1.ShardService/Push")
            with pytest.raises(grpc.aio.AioRpcError) as small:
                await status(bytes(MIB), timeout=T)
            before = peak_bytes(process.pid)
            with pytest.raises(grpc.aio.AioRpcError) as large:
                await status(bytes(inflated), timeout=T)
            with pytest.raises(grpc.aio.AioRpcError) as frames:
                await push(iter([bytes(inflated), b""]), timeout=T)
            assert peak_bytes(process.pid) - before < 32 * MIB
        for caught in (small, large):
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "bytes that are no StatusRequest" in (caught.value.details() or "")
            assert ("paramserver-error", "ProtocolError") in list(caught.value.trailing_metadata())
        size, _, rest = (frames.value.details() or "").partition(" ")
        assert 0 < int(size) < inflated // 500
        assert rest == "bytes that begin with 1f8b"

    try:
        asyncio.run(main())
    finally:
        process.communicate("", timeout=DEADLINE_S)


# ---- signs of life (H07, H08)

# As fast as gRPC allows: a ping per second.
EAGER = Limits(keepalive_s=1.0, keepalive_timeout_s=0.5)


@pytest.mark.long
def test_a_silent_client_with_pings_is_never_told_off() -> None:
    """The same pings make a server of stock gRPC hang up with `too_many_pings`; ours waits on."""

    async def test(w: GrpcWires) -> None:
        async def forever(_: bytes, __: object) -> bytes:
            await asyncio.Event().wait()
            return b""

        stock = grpc.aio.server()
        handler: Any = grpc.unary_unary_rpc_method_handler(forever)
        stock.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("paramserver.v1.CoordinatorService", {"Status": handler}),)
        )
        port = stock.add_insecure_port("127.0.0.1:0")
        await stock.start()
        parked = Parked()
        server = await w.serve(("Coordinator", Stub(status=parked.unary)))
        mine, strict = (connect(a, limits=EAGER) for a in (server.address, f"127.0.0.1:{port}"))
        w.opened += [mine, strict]
        waiting = spawn(mine.call(STATUS, ASK, timeout=60))
        await parked.until(lambda: parked.arrived == 1)
        with pytest.raises(errors.UnavailableError, match=r"(?i)too many pings"):
            await strict.call(STATUS, ASK, timeout=60)
        # Ours forgives no more pings than the other before it would hang up, if it counted them.
        await asyncio.wait([waiting], timeout=4.0)
        assert not waiting.done()
        assert parked.left == 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stock.stop(0)

    run(GrpcWires, test)


class Wall:
    """Passes everything on between a client and a server until `close`; from then on it reads and keeps silent."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._closed = False
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.swallowed = 0

    async def start(self) -> str:
        """Its address."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Nothing gets through any more."""
        self._closed = True

    async def stop(self) -> None:
        """Hang up."""
        self._server.close()
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += (writer, other_writer)
        for one, another in ((reader, other_writer), (other_reader, writer)):
            self._tasks.append(asyncio.get_running_loop().create_task(self._pass_on(one, another)))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if self._closed:
                    self.swallowed += len(data)
                else:
                    writer.write(data)
                    await writer.drain()
        finally:
            if not self._closed:  # no word of an end gets through, either
                writer.close()


@pytest.mark.parametrize("eager", ["client", "server"])
def test_a_peer_behind_a_black_hole_is_missed(eager: str) -> None:
    async def test(w: GrpcWires) -> None:
        parked = Parked()
        server = await serve(
            [("Coordinator", Stub(status=parked.unary))], limits=EAGER if eager == "server" else LIMITS
        )
        w.opened.append(server)
        wall = Wall(server.port)
        channel = connect(await wall.start(), limits=EAGER if eager == "client" else LIMITS)
        call = spawn(channel.call(STATUS, ASK, timeout=60))
        try:
            await parked.until(lambda: parked.arrived == 1)
            began = asyncio.get_running_loop().time()
            wall.close()
            if eager == "client":
                with pytest.raises(errors.UnavailableError, match="ping timeout"):
                    await call
            else:
                await parked.until(lambda: parked.left == 1)
                assert not call.done()
            took = asyncio.get_running_loop().time() - began
            # The sum of both times, and a second for a machine that is busy.
            assert took < EAGER.keepalive_s + EAGER.keepalive_timeout_s + 1.0
            assert wall.swallowed > 0
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await channel.close()
            await wall.stop()

    run(GrpcWires, test)


def test_a_refused_push_does_not_wait_for_its_frames() -> None:
    """Without a token nothing of an upload is taken; the sender hears at once."""

    async def test(w: GrpcWires) -> None:
        server = await serve([("Shard", Stub())], security=plain([JOIN]))
        w.opened.append(server)
        taken = 0

        def frames() -> Any:
            nonlocal taken
            for _ in range(1000):
                taken += 1
                yield bytes(MIB)

        with pytest.raises(errors.DeniedError):
            await w.connect(server.address).upload(PUSH, frames(), timeout=T)
        assert taken < 100

    run(GrpcWires, test)
