"""Serves an application over HTTP in the event loop of its process, from the first connection on.

Until then there is only a socket that listens: a job that nobody looks at does not even import the web server.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import ssl
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from paramserver import errors
from paramserver.transport.addresses import join
from paramserver.transport.entrance import End, Entrance
from paramserver.transport.security.tls import Certificates
from paramserver.web.guard import App

if TYPE_CHECKING:
    import uvicorn

log = structlog.get_logger("paramserver.web")

EXTRA = "dashboard"
_NEEDED = ("prometheus_client", "starlette", "uvicorn")
_CLOSE_S = 2.0
# Certificates that were replaced count from then on.
_LOOK_S = 5.0


def installed() -> bool:
    """Whether the packages of the extra are there."""
    return all(importlib.util.find_spec(name) is not None for name in _NEEDED)


class Site:
    """One socket, and the application behind it.

    ``make`` makes the application when somebody connects. ``name``: of the application, which is that of its flag.
    """

    def __init__(
        self, make: Callable[[], App], certificates: Certificates | None = None, name: str = "dashboard"
    ) -> None:
        self._make = make
        self._certificates = certificates
        self._name = name
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._entrance: Entrance | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    def listen(self, host: str, port: int) -> None:
        """Take the port; 0 is any free one. Raises ConfigError if that cannot be."""
        try:
            family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(128)
        except OSError as error:
            self._shut()
            why = (error.strerror or "error").lower()
            raise errors.ConfigError(
                f"the {self._name} cannot listen on {join(host, port)} ({why}): choose another address with "
                f"--{self._name}, or say --{self._name} off"
            ) from error
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._somebody)

    def _somebody(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        assert self._socket is not None
        try:
            server = self._server = await asyncio.to_thread(self._prepare)
            renewing = asyncio.create_task(self._renew(server.config))
            try:
                self._open(server)
                await server.serve([])
            finally:
                renewing.cancel()
        except Exception as error:  # the job goes on without it
            log.error(f"the {self._name} port has ended", trace="".join(traceback.format_exception(error)))

    def _open(self, server: uvicorn.Server) -> None:
        """Take connections."""
        from paramserver.web.server import MAX_STRANGERS, Guest

        def take(sock: socket.socket, _: str, number: int) -> End:
            return Guest(server, sock, lambda: entrance.settled(number)).end

        assert self._socket is not None
        entrance = self._entrance = Entrance(f"connection to the {self._name} port", take, MAX_STRANGERS)
        entrance.open(self._socket)

    def _prepare(self) -> uvicorn.Server:
        """Import and configure the server, which takes a while."""
        from paramserver.web.server import configured

        pair = None
        if self._certificates is not None:
            pair = self._certificates.pair()
        return configured(self._make(), pair)

    async def _renew(self, config: uvicorn.Config) -> None:
        """Take certificates that were replaced for new connections."""
        if self._certificates is None:
            return
        used = self._certificates.current()
        while True:
            await asyncio.sleep(_LOOK_S)
            found = self._certificates.current()
            if found is not used and config.ssl is not None:
                used = found
                with contextlib.suppress(ssl.SSLError):  # the pair is being replaced: the next look finds both
                    config.ssl.load_cert_chain(*self._certificates.pair())

    async def close(self) -> None:
        """Stop serving. Connections that are still open are cut after a moment."""
        if self._socket is not None and self._task is None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if self._entrance is not None:
            self._entrance.close()
        if self._task is not None:
            if self._server is not None:
                self._server.should_exit = True
            done, _ = await asyncio.wait({self._task}, timeout=_CLOSE_S)
            if not done:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def split(listen: str) -> tuple[str, int]:
    """ "host:port" as both. The setting has been checked."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)
