"""Metrics for an OpenTelemetry collector (OTLP over HTTP). The packages are those of the extra `otel`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from paramserver import errors
from paramserver.config import Settings
from paramserver.transport.addresses import resolves_to_loopback
from paramserver.web.metrics.table import Metric, Samples

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

log = structlog.get_logger("paramserver.web")

EXTRA = "otel"
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
# One look serves all metrics of one export.
_FRESH_S = 0.5
_READ_S = 2.0
_LAST_S = 3.0
_UNITS = {"bytes": "By", "seconds": "s"}


def installed() -> bool:
    """Whether the packages of the extra are there."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        return False


class Telemetry:
    """Sends the metrics of this process where web.otlp says; does nothing if that is empty.

    ``read`` is called for each export, in the event loop. ``name``: of the process in the job.
    """

    def __init__(
        self,
        settings: Settings,
        role: str,
        metrics: Sequence[Metric],
        read: Callable[[], Awaitable[Samples]],
        name: Callable[[], str],
    ) -> None:
        self._settings, self._role = settings, role
        self._metrics, self._read, self._name = metrics, read, name
        self._provider: MeterProvider | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._samples: Samples = {}
        self._read_at = float("-inf")

    async def start(self, reader: MetricReader | None = None) -> None:
        """Begin to send. ``reader``: takes the metrics in place of the collector, in tests.

        Raises ConfigError if the packages are missing, or if metrics would cross a network without TLS.
        """
        url = self._settings.web.otlp
        if not url:
            return
        if not installed():
            raise errors.ConfigError(
                f"web.otlp is {url}, but the packages of OpenTelemetry are not installed: run "
                f"pip install 'paramserver[{EXTRA}]', or leave web.otlp empty"
            )
        await self._check(url)
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._begin, url, reader)

    async def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme == "https" or self._settings.security.insecure:
            return
        try:
            near = await resolves_to_loopback(parts.hostname or "")
        except OSError:
            near = False
        if not near:
            raise errors.ConfigError(
                f"web.otlp is {url}: metrics for another machine take TLS; say https, or accept that everybody on the "
                "network can read them (--insecure)"
            )

    def _begin(self, url: str, reader: MetricReader | None) -> None:
        """Import the SDK, which takes a while, and make one instrument for each metric."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        facts = {
            "service.name": "paramserver",
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "paramserver.job": self._settings.cluster.job,
            "paramserver.role": self._role,
        }
        if reader is None:
            exporter = OTLPMetricExporter(endpoint=f"{url.rstrip('/')}/v1/metrics")
            reader = PeriodicExportingMetricReader(exporter)
        self._provider = MeterProvider([reader], resource=Resource.create(facts), shutdown_on_exit=False)
        meter = self._provider.get_meter("paramserver")
        for metric in self._metrics:
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            unit = _UNITS.get(metric.name.rpartition("_")[2], "")
            make(f"paramserver.{metric.name}", [partial(self._observe, metric)], unit, metric.help)

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        """In a thread of the SDK."""
        from opentelemetry.metrics import Observation

        if os.getpid() != self._pid:  # a process that the script has forked
            return []
        name = self._name()
        found = self._look().get(metric.name, [])
        return [
            Observation(value, {**dict(zip(metric.labels, labels, strict=True)), "process": name})
            for labels, value in found
        ]

    def _look(self) -> Samples:
        assert self._loop is not None
        if time.monotonic() - self._read_at > _FRESH_S:
            self._read_at = time.monotonic()
            self._samples = {}
            reading = asyncio.run_coroutine_threadsafe(self._gather(), self._loop)
            try:
                self._samples = reading.result(_READ_S)
            except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, errors.ParamServerError):
                reading.cancel()  # nothing is known now
        return self._samples

    async def _gather(self) -> Samples:
        return await self._read()

    async def close(self) -> None:
        """Send once more, and no more after that."""
        if self._provider is None:
            return
        provider, self._provider = self._provider, None
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            provider.shutdown(int(_LAST_S * 1000))
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        # No thread of the loop's: the loop would wait for an exporter that tries again and again.
        threading.Thread(target=end, name="telemetry", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await ended.wait()
