"""The web server behind a socket. This module needs the extra `dashboard`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paramserver.transport.limits import LIMITS
from paramserver.web.guard import KNOWN, MAX_HEAD_BYTES, App

MAX_CONNECTIONS = 256
# Connections whose callers have not shown a token.
MAX_STRANGERS = 128
# A connection without a request in progress is closed after at most twice this time.
QUIET_S = 10.0
KEEP_ALIVE_S = 15


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the role."""
        yield


class Patient(H11Protocol):
    """Closes connections on which no request is in progress for a while, also one whose head comes byte by byte.

    A connection whose caller takes nothing of an answer for a while is closed, too.
    """

    _look: asyncio.TimerHandle | None = None
    lost: Callable[[], object] = staticmethod(lambda: None)
    # How often the caller has taken so much of an answer that more may be sent.
    _taken = 0

    def connection_made(self, transport: Any) -> None:
        """A connection: look at it every few seconds."""
        super().connection_made(transport)
        self._look = self.loop.call_later(QUIET_S, self._check, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if self._look is not None:
            self._look.cancel()
        self.lost()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """The caller has taken a good part of what was sent."""
        self._taken += 1
        super().resume_writing()

    def _check(self, seen: tuple[object, bool, int] | None) -> None:
        """``seen``: what the last look has found."""
        idle = self.cycle is None or self.cycle.response_complete
        found = self.cycle, bool(self.flow.write_paused), self._taken
        if found == seen and found[1]:
            self.transport.abort()  # the caller takes nothing of the answer
        elif idle and self.cycle is (seen and seen[0]):
            self.transport.close()
            self._look = self.loop.call_later(QUIET_S, self.transport.abort)
        else:
            self._look = self.loop.call_later(QUIET_S, self._check, found)


class Guest:
    """One connection. ``settled`` is called when its caller has shown a token, and when the connection has ended."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket, settled: Callable[[], object]) -> None:
        self._server, self._sock, self._settled = server, sock, settled
        self._protocol: Patient | None = None
        self._task = asyncio.get_running_loop().create_task(self._welcome())
        self._task.add_done_callback(self._welcomed)

    async def _welcome(self) -> None:
        tls = self._server.config.ssl
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make,
            self._sock,
            ssl=tls,
            ssl_handshake_timeout=LIMITS.handshake_s if tls else None,
            ssl_shutdown_timeout=QUIET_S if tls else None,
        )

    def _make(self) -> Patient:
        self._protocol = Patient(self._server.config, self._server.server_state, {KNOWN: self._settled})
        self._protocol.lost = self._settled
        return self._protocol

    def _welcomed(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:  # no handshake came to its end
            self._settled()
            self._sock.close()

    def end(self) -> None:
        """End the connection at once."""
        if self._task.done() and self._protocol is not None:
            self._protocol.transport.abort()
        self._task.cancel()


def configured(app: App, pair: tuple[Path, Path] | None) -> uvicorn.Server:
    """A server for the application. ``pair``: certificate and key."""
    certificate, key = pair or (None, None)
    config = uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        lifespan="off",
        interface="asgi3",
        loop="none",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    config.load()
    return _Server(config)
