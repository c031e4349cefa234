"""The proxy itself: each fault, in front of a server that sends everything back, and in front of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paramserver import errors
from tests.support.contract.channels import DEADLINE_S, GrpcWires, Stub, echo
from tests.support.contract.channels import run as run_wires
from tests.support.contract.proxy import Proxy, Way
from tests.support.contract.redis_servers import Authority
from tests.support.contract.requests import ASK, STATUS, T

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
received: list[bytes] = []


async def send_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes; at its end, a farewell."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            received.append(data)
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")
        writer.write_eof()
    writer.close()


def run(test: Callable[[Proxy], Awaitable[None]], path: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
    """Run ``test`` with a proxy before such a server; with ``path`` it listens there."""

    async def main() -> None:
        received.clear()
        if path is not None:
            server = await asyncio.start_unix_server(send_back, path)
            upstream = f"unix:{path}"
        else:
            server = await asyncio.start_server(send_back, "127.0.0.1", 0)
            upstream = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, Proxy(upstream, tls) as proxy, asyncio.timeout(DEADLINE_S):
            await test(proxy)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def connected(proxy: Proxy, tls: ssl.SSLContext | None = None) -> AsyncIterator[Stream]:
    """A client of it."""
    host, _, port = proxy.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def there_and_back(stream: Stream, data: bytes = b"hello") -> float:
    """How many seconds it took."""
    start = time.monotonic()
    stream[1].write(data)
    assert await stream[0].readexactly(len(data)) == data
    return time.monotonic() - start


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_without_faults_everything_passes(over: str, tmp_path: Path) -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as one, connected(proxy) as two:
            await there_and_back(one, bytes(range(256)) * 8192)
            await there_and_back(two)
            assert (proxy.connections, proxy.open) == (2, 2)
            one[1].write_eof()
            assert await one[0].read() == b"bye"  # after one direction has ended, the other goes on
        assert not proxy.fired
        with pytest.raises(AssertionError, match="never fired: cut, delay"):
            proxy.check("cut", "delay")

    run(test, tmp_path / "s" if over == "unix" else None)


@pytest.mark.parametrize("way", Way)
def test_delay_of_one_direction(way: Way) -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as stream:
            await there_and_back(stream)
            proxy.delay(way, 0.3)
            assert 0.3 <= await there_and_back(stream) < 5
            # It is latency, not a slow line: of many messages the last one is as late as the first.
            start = time.monotonic()
            for number in range(20):
                stream[1].write(b"%02d" % number)
                await asyncio.sleep(0.005)
            assert await stream[0].readexactly(40) == b"".join(b"%02d" % number for number in range(20))
            assert time.monotonic() - start < 2
            proxy.check("delay")
            stream[1].write(b"slow")
            await asyncio.sleep(0.05)
            proxy.delay(way, 0)
            stream[1].write(b"fast")
            assert await stream[0].readexactly(8) == b"slowfast"  # never out of order

    run(test)


@pytest.mark.parametrize("way", Way)
def test_throttle(way: Way) -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as stream:
            proxy.throttle(way, 100_000)
            assert 0.4 < await there_and_back(stream, bytes(50_000)) < 5
            proxy.check("throttle")
            proxy.throttle(way, 0)
            assert await there_and_back(stream, bytes(50_000)) < 0.4

    run(test)


def test_slices_arrive_one_by_one() -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as stream:
            proxy.slice(Way.REQUEST, 3, 0.02)
            await there_and_back(stream, b"0123456789")
            assert received == [b"012", b"345", b"678", b"9"]
            assert proxy.fired["slice"] == 3

    run(test)


def test_pause_and_resume() -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as stream:
            for ways in ((), (Way.REQUEST,), (Way.REPLY,)):
                received.clear()
                proxy.pause(*ways)
                stream[1].write(b"x")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(stream[0].read(1), 0.1)
                assert bool(received) == (ways == (Way.REPLY,))
                proxy.resume()
                assert await stream[0].read(1) == b"x"
            assert proxy.fired["pause"] == 3
            proxy.pause()
            async with connected(proxy) as late:  # it is let in, and hears nothing
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(there_and_back(late), 0.1)

    run(test)


@pytest.mark.parametrize("after_bytes", [0, 1, 4, 1000])
@pytest.mark.parametrize("way", Way)
def test_cut(way: Way, after_bytes: int) -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as stream:
            await there_and_back(stream)
            received.clear()
            proxy.cut(way, after_bytes)
            data = bytes(after_bytes)
            await there_and_back(stream, data)
            proxy.fired.clear()
            stream[1].write(b"!")
            with pytest.raises(ConnectionResetError):
                assert await stream[0].read(1)
            assert proxy.fired["cut"] == 1
            assert b"".join(received) == data + (b"!" if way is Way.REPLY else b"")
        async with connected(proxy) as stream:
            await there_and_back(stream)
            assert proxy.fired["cut"] == 1

    run(test)


def test_cut_within_a_message_and_more_than_once() -> None:
    async def test(proxy: Proxy) -> None:
        proxy.cut(Way.REPLY, 3, times=2)
        for _ in range(2):
            async with connected(proxy) as stream:
                stream[1].write(b"hello")
                with pytest.raises(ConnectionResetError):
                    await stream[0].readexactly(5)
        async with connected(proxy) as stream:
            await there_and_back(stream)
        assert proxy.fired["cut"] == 2

    run(test)


def test_reset_refuse_and_accept() -> None:
    async def test(proxy: Proxy) -> None:
        address = proxy.address
        async with connected(proxy) as stream, connected(proxy) as other:
            await there_and_back(stream)
            await there_and_back(other)
            proxy.refuse()
            await there_and_back(stream)  # those that are there stay
            with pytest.raises(ConnectionRefusedError):
                async with connected(proxy):
                    pass
            proxy.pause()  # a reset comes through all the same
            proxy.reset()
            for reader, _ in (stream, other):
                with pytest.raises(ConnectionResetError):
                    await reader.read(1)
            assert proxy.fired["reset"] == 2
        await proxy.heal()
        assert proxy.address == address
        async with connected(proxy) as stream:
            await there_and_back(stream)
        while proxy.open:
            await asyncio.sleep(0.01)

    run(test)


def test_a_server_that_is_not_there() -> None:
    async def main() -> None:
        async with Proxy("127.0.0.1:1") as proxy, connected(proxy) as stream:
            with contextlib.suppress(ConnectionResetError):
                assert await stream[0].read() == b""

    asyncio.run(main())


def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=authority.certificate)

    async def test(proxy: Proxy) -> None:
        async with connected(proxy, context) as stream:
            await there_and_back(stream, bytes(100_000))
            proxy.cut(Way.REPLY)
            stream[1].write(b"x")
            with contextlib.suppress(ConnectionResetError):
                assert await stream[0].read(1) == b""
            proxy.check("cut")

    run(test, tls=authority.server_context("127.0.0.1"))


def test_stop_ends_what_is_open() -> None:
    async def test(proxy: Proxy) -> None:
        async with connected(proxy) as stream:
            await there_and_back(stream)
            await proxy.stop()
            await proxy.stop()
            with contextlib.suppress(ConnectionResetError):
                assert await stream[0].read() == b""
            assert proxy.open == 0

    run(test)


def test_grpc_through_a_proxy() -> None:
    async def test(w: GrpcWires) -> None:
        server = await w.serve(("Coordinator", Stub(status=echo)))
        async with Proxy(server.address) as proxy:
            channel = w.connect(proxy.address)
            assert await channel.call(STATUS, ASK, timeout=T)
            proxy.pause()
            with pytest.raises(errors.DeadlineError):
                await channel.call(STATUS, ASK, timeout=0.3)
            proxy.check("pause")
            proxy.resume()
            proxy.reset()
            while True:
                try:
                    await channel.call(STATUS, ASK, timeout=T)
                    break
                except errors.UnavailableError:
                    await asyncio.sleep(0.02)
            assert proxy.connections == 2

    run_wires(GrpcWires, test)
