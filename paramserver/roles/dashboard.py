"""The dashboard of a coordinator process: its settings, its socket, its looks at the job."""

from __future__ import annotations

import contextlib

import structlog

from paramserver import errors
from paramserver.config import FIELDS, Settings, shown
from paramserver.coordinator.endpoint import Endpoint
from paramserver.processes.environment import told_origins
from paramserver.transport.addresses import join, own_loopback
from paramserver.transport.security.access import Security
from paramserver.web import models
from paramserver.web.access import Access
from paramserver.web.feed import Feed
from paramserver.web.guard import App
from paramserver.web.metrics.job import METRICS, samples
from paramserver.web.metrics.table import Samples
from paramserver.web.metrics.telemetry import Telemetry
from paramserver.web.serving import EXTRA, Site, installed, split

log = structlog.get_logger("paramserver.web")

_EVERYWHERE = ("0.0.0.0", "::")


class Dashboard:
    """The web server of a coordinator; ``url`` is empty if there is none."""

    def __init__(self, settings: Settings, security: Security, endpoint: Endpoint) -> None:
        self.url = ""
        self._settings = settings
        self._security = security
        self._endpoint = endpoint
        self._feed = Feed(endpoint.status)
        self._site: Site | None = None
        self._telemetry = Telemetry(settings, "coordinator", METRICS, self._samples, lambda: "coordinator")

    async def start(self, advertised: str, again: bool = False) -> None:
        """Begin to serve. ``advertised``: the host under which others reach this process.

        ``again``: this process takes the place of another one, and goes on without the page if the port is taken.
        Raises ConfigError if an address is set and cannot be served.
        """
        await self._telemetry.start()
        wanted = self._settings.web.dashboard
        if wanted == "off" or (wanted == "auto" and not installed()):
            return
        if not installed():
            raise errors.ConfigError(
                f"web.dashboard is {wanted}, but the packages of the dashboard are not installed: run "
                f"pip install 'paramserver[{EXTRA}]', or say --dashboard off"
            )
        host, port = split(join(own_loopback(), 0) if wanted == "auto" else wanted)
        try:
            await self._security.check_listen(host)
            site = Site(lambda: self._make(host, advertised), self._security.certificates)
            site.listen(host, port)
        except errors.ConfigError as error:
            if not (again or wanted == "auto"):
                raise
            log.warning("there is no dashboard", reason=str(error))
            return
        self._site = site
        named = advertised if host in _EVERYWHERE else host
        self.url = f"{'https' if self._security.tls else 'http'}://{join(named, site.port)}"
        self._feed.start()

    @property
    def port(self) -> int:
        """The port; 0: none."""
        return self._site.port if self._site is not None else 0

    async def show_end(self) -> None:
        """Look at the job now, and tell all who watch."""
        if self.url:
            with contextlib.suppress(errors.ParamServerError):
                await self._feed.look()

    async def _samples(self) -> Samples:
        return samples(await self._feed.status(), await self._feed.events())

    def _make(self, host: str, advertised: str) -> App:
        # Starlette is imported when somebody looks.
        from paramserver.web.api import Api, make_app

        names = frozenset(name.strip("[]").lower() for name in (host, advertised) if name)
        access = Access(self._security, names)
        return make_app(
            Api(self._endpoint, self._feed, access, settings_of(self._settings), self._security.tls), access
        )

    async def close(self) -> None:
        """Serve no more."""
        await self._telemetry.close()
        await self._feed.close()
        if self._site is not None:
            await self._site.close()


def settings_of(settings: Settings) -> list[models.Setting]:
    """All settings in force without their secrets, and where each came from."""
    origins = settings.origins() | told_origins()
    return [
        models.Setting(
            key=key, value=str(shown(key, value)), origin=origins[key], description=FIELDS[key].description or ""
        )
        for key, value in settings.values().items()
    ]
