"""Every role is scraped during a real run, in both modes, and says what `status --json` says."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.integration.harness import SCRIPTS, Place, place_fixture, until

pytestmark = pytest.mark.long

TRAIN = SCRIPTS / "train.py"
Found = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def scraped(place: Place, url: str) -> Found:
    with urllib.request.urlopen(urllib.request.Request(url, headers=place.reader()), timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_role_says_what_the_status_says(mode: str, place: Place) -> None:
    flags: list[str | Path] = ["--servers", "2", "--workers", "2", "--mode", mode, "--metrics", "127.0.0.1:0"]
    flags += ["--dashboard", "127.0.0.1:0", "--set", "cluster.replicas=1"]
    running = place.launch("run", TRAIN, *flags, "--", "--epochs", "40", "--pace", "0.5")
    running.wait_for(r"rank \d of 2 trains", count=2)

    def steps() -> bool:
        return min(int(p["version"]) for p in place.status()["processes"] if p["role"] != "coordinator") > 1

    until("some steps", steps, 60.0)
    before = place.status()
    members = {p["name"]: p for p in before["processes"] if p["role"] != "coordinator"}
    found = {name: scraped(place, process["metrics_url"]) for name, process in members.items()}
    job = scraped(place, f"{before['dashboard']}/metrics")
    after = place.status()

    # What the job has done only grows, and the scrapes lie between the two looks.
    later = {p["name"]: p for p in after["processes"]}
    for name, process in members.items():
        own = found[name]
        assert own["paramserver_member", tuple(sorted((process["role"], name)))] == 1
        assert own["process_resident_memory_bytes", ()] > 1 << 20
        if process["role"] == "worker":
            assert process["samples"] <= own["paramserver_worker_samples_total", ()] <= later[name]["samples"]
            assert process["slices"] <= own["paramserver_worker_slices_total", ()] <= later[name]["slices"]
            assert own["paramserver_worker_state", ("training",)] == 1
        else:
            received = [
                value for (metric, _), value in own.items() if metric == "paramserver_shard_received_bytes_total"
            ]
            assert len(received) == 2, "a shard of its own, and a copy"
            assert _bytes(process) <= sum(received) <= _bytes(later[name])
    assert before["version"] <= job["paramserver_version", ()] <= after["version"]
    assert job["paramserver_job_state", ("training",)] == 1
    assert job["paramserver_members", ("worker",)] == 2

    place.paramserver("stop").check()
    running.wait()


def _bytes(process: dict[str, Any]) -> int:
    return int(process["server"]["bytes_pushed"])
