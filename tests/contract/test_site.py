"""The HTTP server over real sockets: its beginning and end, the certificates of the job, and limits of patience."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.pki import certs
from paramserver.transport.limits import Limits
from paramserver.transport.security.tls import Certificates, server_name
from paramserver.web import server
from paramserver.web.serving import Site

DEADLINE_S = 20.0


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that greets."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def site(certificates: Certificates | None = None) -> AsyncIterator[tuple[Site, list[str]]]:
    made: list[str] = []

    def make() -> Any:
        made.append("made")
        return hello

    one = Site(make, certificates)
    one.listen("127.0.0.1", 0)
    try:
        yield one, made
    finally:
        await one.close()


async def ask(port: int, context: ssl.SSLContext | None = None, request: bytes = b"GET / HTTP/1.1\r\n") -> bytes:
    """All that comes back on one connection until it is closed."""
    name = server_name("coordinator") if context else None
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        writer.write(request + b"host: localhost\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    return answer


def test_nothing_is_made_before_somebody_connects() -> None:
    async def story() -> None:
        async with site() as (one, made):
            assert made == []
            assert (await ask(one.port)).endswith(b"hello")
            assert made == ["made"]
            assert (await ask(one.port)).endswith(b"hello")
            assert made == ["made"]
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await ask(one.port)

    asyncio.run(story())


def test_the_certificate_is_that_of_the_coordinator(tmp_path: Path) -> None:
    certs.init(tmp_path / "certs")

    async def story() -> None:
        context = ssl.create_default_context(cafile=tmp_path / "certs" / "ca.crt")
        async with site(Certificates(tmp_path / "certs", "coordinator")) as (one, _):
            assert (await ask(one.port, context)).endswith(b"hello")
            assert b"hello" not in await ask(one.port)
            with pytest.raises(ssl.SSLCertVerificationError):
                await ask(one.port, ssl.create_default_context())

    asyncio.run(story())


def test_a_head_that_does_not_come_and_one_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUIET_S", 0.1)

    async def story() -> None:
        async with site() as (one, _), asyncio.timeout(DEADLINE_S):
            for beginning in (b"", b"GET / HTTP/1.1\r\nhost: loc"):
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(beginning)
                assert await reader.read() == b""
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()

    asyncio.run(story())


def test_a_port_that_is_taken_is_said_at_once() -> None:
    async def story() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(errors.ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--dashboard off"):
                Site(lambda: hello).listen("127.0.0.1", port)

    asyncio.run(story())


@asynccontextmanager
async def idle(port: int, count: int, first: bytes = b"") -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections of strangers, who send this and no more."""
    made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        for _, writer in made:
            writer.write(first)
        yield [reader for reader, _ in made]
    finally:
        for _, writer in made:
            writer.close()


def test_idle_strangers_keep_nobody_out() -> None:
    """The oldest give way, so those who ask at once are answered."""

    async def story() -> None:
        async with site() as (one, _), idle(one.port, 2 * server.MAX_STRANGERS) as strangers:
            async with asyncio.timeout(DEADLINE_S):
                assert (await ask(one.port)).endswith(b"hello")
                for reader in strangers[: server.MAX_STRANGERS]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""

    asyncio.run(story())


def test_without_descriptors_the_port_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio's own server writes two thousand lines a second then."""

    async def story() -> None:
        async with site() as (one, _), asyncio.timeout(DEADLINE_S):
            assert (await ask(one.port)).endswith(b"hello")
            said: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
            tries, accept = 0, socket.socket.accept

            def refusing(sock: socket.socket) -> Any:
                nonlocal tries
                tries += 1
                if tries < 3:
                    raise OSError(errno.EMFILE, "too many open files")
                return accept(sock)

            monkeypatch.setattr(socket.socket, "accept", refusing)
            assert (await ask(one.port)).endswith(b"hello")
            assert said == []

    asyncio.run(story())


def test_a_handshake_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LIMITS", Limits(handshake_s=0.2))
    certs.init(tmp_path / "certs")

    async def story() -> None:
        half = b"\x16\x03\x01\x02\x00\x01"
        async with (
            site(Certificates(tmp_path / "certs", "coordinator")) as (one, _),
            idle(one.port, 3, half) as strangers,
            asyncio.timeout(DEADLINE_S),
        ):
            for reader in strangers:
                assert await reader.read() == b""

    asyncio.run(story())


def test_who_takes_nothing_of_an_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUIET_S", 0.1)

    async def story() -> None:
        ended = asyncio.Event()

        async def long(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1000):  # after the connection has ended this takes no time
                await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
            ended.set()

        one = Site(lambda: long)
        one.listen("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        writer.close()
        await one.close()

    asyncio.run(story())
