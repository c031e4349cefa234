"""The web server behind a socket. This module needs the extra `dashboard`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paramserver.web.guard import MAX_HEAD_BYTES, App

MAX_CONNECTIONS = 256
# A connection without a request in progress is closed after at most twice this time.
QUIET_S = 10.0
KEEP_ALIVE_S = 15


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the role."""
        yield


class Patient(H11Protocol):
    """Closes connections on which no request is in progress for a while, also one whose head comes byte by byte."""

    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection: look at it every few seconds."""
        super().connection_made(transport)
        self._look = self.loop.call_later(QUIET_S, self._check, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _check(self, seen: object) -> None:
        """``seen``: the last request of the last look."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is seen:
            self.transport.close()
            return
        self._look = self.loop.call_later(QUIET_S, self._check, self.cycle)


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
