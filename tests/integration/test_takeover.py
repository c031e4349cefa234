"""The coordinator dies, hangs, is replaced; the store goes away and comes back: real processes, a real store."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.coordinator.leadership.journal import parse_record
from paramserver.store import open_store
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.integration.harness import Place, complaint, read_summary, until
from tests.support.integration.roles import LEASE_S, TRAIN, Cluster, cluster_fixture, kill, reference, same_result

EPOCHS = 12
SCRIPT = ("--epochs", str(EPOCHS))
JOB = ("--workers", "2", "--set", "training.slices_per_step=4")
SLICES = 15 * EPOCHS
# What a coordinator says when it leads.
LEADS = r"(?m)^coordinator of job"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


@pytest.fixture(scope="module")
def wanted() -> Iterator[dict[str, Any]]:
    """The result without faults."""
    with Place() as place:
        yield reference(place, *SCRIPT)


def begin(cluster: Cluster, pace: float = 0.1) -> Path:
    """Two servers and two workers in the middle of the training; returns the file that ends the slow pace."""
    hurry = cluster.place.work / "hurry"
    for _ in range(2):
        cluster.server()
        cluster.worker(*SCRIPT, "--pace", str(pace), "--hurry", hurry)
    cluster.until_status("training", lambda s: version_of(s) >= 3)
    return hurry


def version_of(status: dict[str, Any]) -> int:
    """The newest version that a server has published."""
    return max((p["version"] for p in status["processes"] if p["role"] == "server"), default=0)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_a_standby_takes_over(cluster: Cluster, wanted: dict[str, Any], mode: str) -> None:
    summary = cluster.place.work / "out.json"
    flags = (*JOB, "--servers", "2", "--mode", mode, "--summary", summary)
    first, _second = cluster.coordinator(*flags), cluster.coordinator(*flags)
    hurry = begin(cluster)
    before = cluster.status()
    kill(first)
    cluster.coordinators.remove(first)
    after = cluster.until_status("a new leader", lambda s: s["term"] > before["term"], LEASE_S + 15.0)
    assert after["generation"] > before["generation"]
    assert after["lost"] == []
    hurry.touch()
    cluster.ended()
    found = read_summary(summary)
    assert (found["samples"], found["contributions_applied"]) == (230 * EPOCHS, SLICES)
    if mode == "sync":
        same_result(found, wanted)
    for member in (*cluster.servers, *cluster.workers):
        assert "lost the coordinator; training goes on" in member.err


@pytest.mark.long
def test_a_restarted_coordinator_resumes_only_if_told_to(cluster: Cluster, wanted: dict[str, Any]) -> None:
    summary = cluster.place.work / "out.json"
    flags = (*JOB, "--servers", "2", "--summary", summary)
    first = cluster.coordinator(*flags)
    hurry = begin(cluster)
    kill(first)
    cluster.coordinators.clear()
    time.sleep(LEASE_S)  # so that its lease has ended: this is no standby
    listen = ("--listen", cluster.addresses[0])
    text = complaint(cluster.coordinator(*flags, wait=False).wait(), 2)
    assert "--resume" in text
    assert "--fresh" in text
    cluster.coordinators.clear()
    done = cluster.place.paramserver("run", TRAIN, "--job", cluster.job, "--store", cluster.url).check(2)
    assert "has not ended" in done.said
    again = cluster.place.launch(
        *("start", "coordinator", *listen, "--job", cluster.job, "--store", cluster.url, "--resume"),
        *flags,
        environ=cluster.environ,
    )
    cluster.coordinators.append(again)
    again.wait_for(LEADS)
    hurry.touch()
    cluster.ended()
    same_result(read_summary(summary), wanted)
    # It has ended well, so nothing stands in the way of another job of this name.
    cluster.place.paramserver("run", TRAIN, "--job", cluster.job, "--store", cluster.url, "--", "--epochs", "1").check()


@pytest.mark.long
def test_training_goes_on_without_a_coordinator(cluster: Cluster, wanted: dict[str, Any]) -> None:
    """All steps are made without one; the workers wait to tell the next coordinator that they are through."""
    summary = cluster.place.work / "out.json"
    flags = (*JOB, "--servers", "2", "--summary", summary)
    first = cluster.coordinator(*flags)
    hurry = begin(cluster)
    kill(first)
    cluster.coordinators.clear()
    hurry.touch()
    for worker in cluster.workers:
        worker.wait_for_err("to tell it that this process is done")
    again = cluster.place.launch(
        *("start", "coordinator", "--listen", cluster.addresses[0], "--job", cluster.job, "--store", cluster.url),
        *(*flags, "--resume"),
        environ=cluster.environ,
    )
    cluster.coordinators.append(again)
    cluster.ended()
    same_result(read_summary(summary), wanted)


@pytest.mark.long
def test_a_leader_that_was_paused_steps_down(cluster: Cluster, wanted: dict[str, Any]) -> None:
    summaries = [cluster.place.work / name for name in ("first.json", "second.json")]
    first, second = (cluster.coordinator(*JOB, "--servers", "2", "--summary", summary) for summary in summaries)
    hurry = begin(cluster)
    before = cluster.status()
    first.send(signal.SIGSTOP)
    second.wait_for(LEADS, LEASE_S + 30.0)
    first.send(signal.SIGCONT)
    first.wait_for_err("this coordinator steps down", 30.0)
    after = cluster.until_status("the new leader", lambda s: s["term"] > before["term"], 30.0)
    assert after["timeline"] == before["timeline"]
    hurry.touch()
    for one in (*cluster.workers, *cluster.servers, second):
        one.wait().check()
    same_result(read_summary(summaries[1]), wanted)
    assert not summaries[0].exists()
    first.send(signal.SIGTERM)
    assert first.wait(10.0).code in (0, 143)


@pytest.mark.long
def test_the_store_goes_away_and_comes_back(cluster: Cluster, wanted: dict[str, Any]) -> None:
    summary = cluster.place.work / "out.json"
    coordinator = cluster.coordinator(*JOB, "--servers", "2", "--summary", summary)
    hurry = begin(cluster)
    before = cluster.status()
    cluster.store.stop()
    coordinator.wait_for_err("the store is away; the job goes on", LEASE_S + 10.0)
    time.sleep(LEASE_S + 1.0)  # longer than its lease there would have lasted
    during = cluster.status()
    assert version_of(during) > version_of(before)
    assert during["lost"] == []
    assert during["state"] == "degraded"
    assert "so no other coordinator could take the job over now" in during["reason"]
    for name in os.listdir(cluster.store_directory):  # and it has forgotten everything
        if name != "store.lock":
            remove(cluster.store_directory / name)
    assert cluster.store.start(cluster.store_directory) == cluster.url
    coordinator.wait_for_err("the store is back", 10.0)
    coordinator.wait_for_err("it is written again", 10.0)
    until("everything is written again", lambda: all(entries(cluster.url, cluster.job, "state", "model")), 10.0)
    after = cluster.status()
    assert after["term"] == before["term"]
    assert after["state"] == "training"
    # What was written again is enough for another coordinator.
    kill(coordinator)
    cluster.coordinators.clear()
    time.sleep(LEASE_S)
    again = cluster.place.launch(
        *("start", "coordinator", "--listen", cluster.addresses[0], "--job", cluster.job, "--store", cluster.url),
        *(*JOB, "--servers", "2", "--summary", summary, "--resume"),
        environ=cluster.environ,
    )
    cluster.coordinators.append(again)
    again.wait_for(LEADS)
    hurry.touch()
    cluster.ended()
    same_result(read_summary(summary), wanted)


@pytest.mark.long
def test_two_jobs_on_one_store(cluster: Cluster) -> None:
    flags = ("--workers", "1")
    other = cluster.beside("other")
    for one in (cluster, other):
        one.coordinator(*flags)
        one.server()
        one.worker("--epochs", "3")
    for one in (cluster, other):
        one.ended()
    records = [record_of(cluster.url, job) for job in ("roles", "other")]
    assert [record.view.state for record in records] == [types_pb2.JOB_STATE_DONE] * 2
    assert [json.loads(record.summary)["job"] for record in records] == ["roles", "other"]


def record_of(url: str, job: str) -> coordinator_pb2.JobRecord:
    """What a coordinator has written down."""
    (state,) = entries(url, job, "state")
    assert state is not None
    return parse_record(state)


def entries(url: str, job: str, *keys: str) -> list[bytes | None]:
    """What lies in the store under these names."""

    async def load() -> list[bytes | None]:
        store = open_store(url, f"paramserver:{job}")
        try:
            found = [await store.load(key) for key in keys]
        finally:
            await store.close()
        return [entry.value if entry is not None else None for entry in found]

    return asyncio.run(load())


def remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            remove(inner)
        path.rmdir()
    else:
        path.unlink()
