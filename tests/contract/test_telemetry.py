"""Metrics for OpenTelemetry: through the SDK's reader in memory, and over HTTP to a collector that is a socket here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paramserver import errors
from paramserver.config import Settings, load_settings
from paramserver.v1 import shard_pb2
from paramserver.web.metrics.members import SERVER, server_samples
from paramserver.web.metrics.table import Samples
from paramserver.web.metrics.telemetry import Telemetry

REPORT = shard_pb2.StatsResponse(holds="layout", shard=1, version=9, bytes_pushed=700, checkpoint_pause_s=0.5)
DEADLINE_S = 20.0


def settings(otlp: str, **more: object) -> Settings:
    return load_settings(overrides={"web.otlp": otlp, "cluster.job": "digits", **more}, environ={})


def telemetry(wanted: Settings) -> Telemetry:
    async def read() -> Samples:
        return server_samples("server-1", [REPORT])

    return Telemetry(wanted, "server", SERVER, read, lambda: "server-1")


def test_the_collector_gets_what_prometheus_reads() -> None:
    reader = InMemoryMetricReader()

    async def story() -> Any:
        one = telemetry(settings("http://127.0.0.1:1"))
        await one.start(reader)
        data = await asyncio.to_thread(reader.get_metrics_data)
        await one.close()
        return data

    (found,) = asyncio.run(story()).resource_metrics
    assert found.resource.attributes["paramserver.job"] == "digits"
    assert found.resource.attributes["service.name"] == "paramserver"
    metrics = {metric.name: metric for metric in found.scope_metrics[0].metrics}
    (point,) = metrics["paramserver.shard_received_bytes"].data.data_points
    assert (point.value, dict(point.attributes)) == (700, {"shard": "1", "process": "server-1"})
    assert metrics["paramserver.shard_received_bytes"].unit == "By"
    assert metrics["paramserver.shard_checkpoint_pause_seconds"].unit == "s"
    assert {name.removeprefix("paramserver.") for name in metrics} <= {metric.name for metric in SERVER}


def test_the_last_values_reach_a_collector_over_http() -> None:
    async def story() -> bytes:
        got = asyncio.get_running_loop().create_future()

        async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            writer.close()
            if not got.done():
                got.set_result(head)

        async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(collect, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            one = telemetry(settings(f"http://127.0.0.1:{port}"))
            await one.start()
            await one.close()
            return bytes(await got)

    head = asyncio.run(story()).decode().lower()
    assert head.startswith("post /v1/metrics http/1.1")
    assert "application/x-protobuf" in head


def test_another_machine_takes_tls() -> None:
    with pytest.raises(errors.ConfigError, match=r"metrics for another machine take TLS; say https"):
        asyncio.run(telemetry(settings("http://10.0.0.7:4318")).start())


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.web.metrics.telemetry.installed", lambda: False)
    with pytest.raises(errors.ConfigError, match=r"pip install 'paramserver\[otel\]', or leave web.otlp empty"):
        asyncio.run(telemetry(settings("http://127.0.0.1:4318")).start())
    asyncio.run(telemetry(settings("")).start())
