"""The metrics of servers and workers about themselves, the port that serves them, and how Prometheus finds them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paramserver import errors
from paramserver.cli.train.run import run
from paramserver.config import load_settings
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.web.facts import status_of
from paramserver.web.metrics.exposition import exposition
from paramserver.web.metrics.job import METRICS
from paramserver.web.metrics.members import MEMBER, SERVER, WORKER, server_samples, worker_samples
from paramserver.web.metrics.port import MetricsPort
from paramserver.web.metrics.table import Metric, Samples
from paramserver.web.metrics.targets import targets_of
from paramserver.wire.bounds import check_newcomer

PRIMARY = shard_pb2.StatsResponse(
    holds="layout",
    shard=0,
    version=9,
    shard_bytes=512,
    applied=18,
    duplicate=1,
    bytes_pushed=700,
    bytes_pulled=900,
    samples=64,
    missing=[{"start": 2, "stop": 5}],
    backups=[{"whole": True}, {"whole": False}],
    checkpoint_pause_s=0.5,
    checkpoint_write_s=1.5,
)
BACKUP = shard_pb2.StatsResponse(holds="layout", shard=1, version=9, backup=True)
WORKING = coordinator_pb2.WorkerReport(
    state="training", version=8, epoch=1, slices=7, samples=224, slice_s=0.25, at_work=True, metrics={"loss": 0.5}
)


def scraped(metrics: Sequence[Metric], samples: Samples) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(exposition(metrics, samples).decode())
        for sample in family.samples
    }


def test_what_prometheus_reads_at_a_server_is_what_its_shards_report() -> None:
    found = scraped(SERVER, server_samples("server-0", [PRIMARY, BACKUP]))
    expected = {
        ("paramserver_member", ("server", "server-0")): 1,
        ("paramserver_shard_version", ("0", "primary")): 9,
        ("paramserver_shard_version", ("1", "backup")): 9,
        ("paramserver_shard_contributions_total", ("0", "applied")): 18,
        ("paramserver_shard_received_bytes_total", ("0",)): 700,
        ("paramserver_shard_sent_bytes_total", ("0",)): 900,
        ("paramserver_shard_missing_slices", ("0",)): 3,
        ("paramserver_shard_backups", ("0",)): 1,
        ("paramserver_shard_checkpoint_pause_seconds_total", ("0",)): 0.5,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ("paramserver_shard_backups", ("1",)) not in found, "a backup has no backups"
    assert found["process_resident_memory_bytes", ()] > 0


def test_what_prometheus_reads_at_a_worker_is_what_it_reports() -> None:
    found = scraped(WORKER, worker_samples("worker-3", WORKING))
    expected = {
        ("paramserver_member", ("worker", "worker-3")): 1,
        ("paramserver_worker_state", ("training",)): 1,
        ("paramserver_worker_samples_total", ()): 224,
        ("paramserver_worker_slice_seconds", ()): 0.25,
        ("paramserver_worker_value", ("loss",)): 0.5,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_a_process_that_still_joins_says_only_that() -> None:
    found = server_samples("", [shard_pb2.StatsResponse(waiting_for="the model")])
    assert {name: values for name, values in found.items() if values} == {"member": [(("server", ""), 0.0)]}


def test_every_metric_of_a_member_has_values() -> None:
    assert [name for name, values in server_samples("server-0", [PRIMARY]).items() if not values] == []
    assert [name for name, values in worker_samples("worker-0", WORKING).items() if not values] == []


def test_no_metric_of_the_job_is_one_of_a_member() -> None:
    """Prometheus would add up what the coordinator and the member both say."""
    assert set(MEMBER) == set(SERVER) & set(WORKER)
    assert not {metric.name for metric in METRICS} & {metric.name for metric in (*SERVER, *WORKER)}


@pytest.mark.parametrize("metric", [*METRICS, *SERVER, *WORKER], ids=lambda metric: str(metric.shown))
def test_names_follow_the_conventions_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"paramserver(_[a-z]+)+", metric.shown)
    assert metric.shown.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|millis|kb|mb|count|s)$", metric.shown)
    assert metric.help.endswith(".")


# ---- the port


def started(wanted: str, security: Security) -> MetricsPort:
    settings = load_settings(overrides={"web.metrics": wanted}, environ={})
    port = MetricsPort(settings, security, MEMBER, dict)

    async def start() -> None:
        await port.start("10.0.0.7")

    asyncio.run(start())
    return port


def test_off_serves_nothing() -> None:
    assert started("off", Security.open()).url == ""


def test_off_loopback_takes_tls_and_a_token() -> None:
    with pytest.raises(errors.ConfigError, match=r"listening on 0\.0\.0\.0 takes TLS and a token"):
        started("0.0.0.0:0", Security.open())


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.web.metrics.port.installed", lambda: False)
    with pytest.raises(errors.ConfigError, match=r"pip install 'paramserver\[dashboard\]', or say --metrics off"):
        started("127.0.0.1:0", Security.open())


def test_processes_of_a_run_cannot_share_a_port(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(errors.ConfigError, match=r"each process of a run needs a port of its own: say port 0"):
        run(str(script), metrics="127.0.0.1:8781")


# ---- discovery


@pytest.mark.parametrize("url", ["http://h:1/metrics", "https://[::1]:65535/metrics", "https://a-b.c_d:8781/metrics"])
def test_members_say_where_they_serve_metrics(url: str) -> None:
    check_newcomer(coordinator_pb2.JoinRequest(metrics_url=url))


@pytest.mark.parametrize(
    "url", ["ftp://h:1/metrics", "http://h/metrics", "http://u@h:1/metrics", "http://h:1/other", "http://h:1/metrics\n"]
)
def test_addresses_to_which_prometheus_must_not_be_sent_are_refused(url: str) -> None:
    with pytest.raises(errors.ProtocolError, match="the address of metrics"):
        check_newcomer(coordinator_pb2.JoinRequest(metrics_url=url))


def test_prometheus_finds_the_members_that_serve_metrics() -> None:
    said = coordinator_pb2.StatusResponse(
        processes=[
            coordinator_pb2.ProcessStatus(role="server", name="server-0", metrics_url="https://10.0.0.7:8781/metrics"),
            coordinator_pb2.ProcessStatus(role="worker", name="worker-0", metrics_url="http://127.0.0.1:9/metrics"),
            coordinator_pb2.ProcessStatus(role="worker", name="worker-1"),
            coordinator_pb2.ProcessStatus(role="worker", name="worker-2", metrics_url="http://h:9/metrics", gone=True),
        ]
    )
    assert targets_of(status_of(said), "server").model_dump() == [
        {
            "targets": ["10.0.0.7:8781"],
            "labels": {"__scheme__": "https", "__metrics_path__": "/metrics", "process": "server-0"},
        }
    ]
    assert [one.targets for one in targets_of(status_of(said)).root] == [["10.0.0.7:8781"], ["127.0.0.1:9"]]
