"""The port at which a server or a worker serves metrics about itself, in the event loop of its network."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import structlog

from paramserver import errors
from paramserver.config import Settings
from paramserver.transport.addresses import join
from paramserver.transport.security.access import Security
from paramserver.web.access import Access
from paramserver.web.guard import App, Guard, Receive, Send
from paramserver.web.metrics.table import Metric, Samples
from paramserver.web.metrics.telemetry import Telemetry
from paramserver.web.serving import EXTRA, Site, installed, split

log = structlog.get_logger("paramserver.web")

PATH = "/metrics"
_EVERYWHERE = ("0.0.0.0", "::")


class MetricsPort:
    """Serves `/metrics` where web.metrics says, and sends the same where web.otlp says.

    ``url`` is empty if it serves nothing. ``read`` is called for each scrape, in the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        security: Security,
        metrics: Sequence[Metric],
        read: Callable[[], Samples],
        name: Callable[[], str] = lambda: "",
    ) -> None:
        """``name``: of the process in the job."""

        async def look() -> Samples:
            return read()

        self.url = ""
        self._telemetry = Telemetry(settings, security.role, metrics, look, name)
        self._wanted = settings.web.metrics
        self._security = security
        self._metrics, self._read = metrics, read
        self._site: Site | None = None
        # The loop itself does not keep a task that only waits.
        self._waiting: asyncio.Task[None] | None = None

    async def start(self, advertised: str) -> None:
        """Begin to serve. ``advertised``: the host under which others reach this process.

        A port that another process has is left alone: this process warns, and goes on without metrics.
        Raises ConfigError for an address at which this process cannot, or must not, listen.
        """
        await self._telemetry.start()
        if self._wanted == "off":
            return
        if not installed():
            raise errors.ConfigError(
                f"web.metrics is {self._wanted}, but the packages for it are not installed: run "
                f"pip install 'paramserver[{EXTRA}]', or say --metrics off"
            )
        host, port = split(self._wanted)
        await self._security.check_listen(host)
        site = Site(lambda: self._make(host, advertised), self._security.certificates, "metrics")
        try:
            site.listen(host, port)
        except errors.ConfigError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE):
                raise
            log.warning("this process serves no metrics", reason=str(error))
            return
        self._site = site
        named = advertised if host in _EVERYWHERE else host
        self.url = f"{'https' if self._security.tls else 'http'}://{join(named, site.port)}{PATH}"
        log.info(f"metrics at {self.url}")

    def _make(self, host: str, advertised: str) -> App:
        # prometheus-client is imported when somebody scrapes.
        from paramserver.web.metrics.exposition import CONTENT_TYPE, exposition

        def answer(path: str) -> tuple[int, str, bytes]:
            if path == PATH:
                return 200, CONTENT_TYPE, exposition(self._metrics, self._read())
            return 404, "application/json", json.dumps({"error": f"there is only {PATH} here"}).encode()

        async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            status, kind, body = answer(scope["path"])
            headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

        names = frozenset(name.strip("[]").lower() for name in (host, advertised) if name)
        return Guard(app, Access(self._security, names))

    async def until_cancelled(self) -> None:
        """Serve until the task of this call is cancelled."""
        self._waiting = asyncio.current_task()
        try:
            await asyncio.Event().wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Serve no more."""
        await self._telemetry.close()
        if self._site is not None:
            await self._site.close()
            self._site = None
