"""Roles started one by one: any order, results as those of the script alone, leaving, draining, stopping."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.integration.harness import complaint, free_address, read_summary, until
from tests.support.integration.roles import Cluster, cluster_fixture, reference, same_result

PACED = ("--epochs", "100000", "--pace", "0.05")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def running(status: dict[str, Any], workers: int) -> bool:
    """The job runs, with so many workers at work."""
    training = [p for p in status["processes"] if p["role"] == "worker" and p["state"] == "training"]
    return status["state"] == "training" and len(training) == workers


def test_the_same_result_as_the_script_alone(cluster: Cluster) -> None:
    """Over gRPC; test_shared_memory.py does it in shared memory."""
    cluster.environ["PARAMSERVER_CLUSTER__TRANSPORT"] = "grpc"
    script = ("--optimizer", "adamw", "--epochs", "3")
    wanted = reference(cluster.place, *script)
    summary, weights = cluster.place.work / "out.json", cluster.place.work / "out.safetensors"
    first = cluster.coordinator(
        *("--servers", "2", "--workers", "3", "--set", "training.slices_per_step=4"),
        *("--summary", summary, "--save", weights),
    )
    for _ in range(3):
        cluster.worker(*script)
    for _ in range(2):
        cluster.server()
    cluster.ended()
    same_result(read_summary(summary), wanted)
    assert weights.stat().st_size > 0
    assert "paramserver start server --restart --join" in first.out
    assert f"weights sha256 {wanted['weights_sha256']}" in first.out
    assert cluster.place.leftovers() == []


def test_members_may_come_before_the_coordinator(cluster: Cluster) -> None:
    cluster.environ["PARAMSERVER_LOG__INTERVAL_S"] = "0.5"
    # A port that is free now; whoever waits there finds the coordinator once it has it.
    address = free_address()
    cluster.addresses.append(address)
    worker, server = cluster.worker("--epochs", "2"), cluster.server()
    for one in (worker, server):
        one.wait_for_err(f"waiting for the coordinator at {address}")
    cluster.addresses.clear()
    coordinator = cluster.place.launch(
        *("start", "coordinator", "--listen", address, "--job", cluster.job, "--store", cluster.url),
        *("--workers", "1"),
        environ=cluster.environ,
    )
    for one in (worker, server, coordinator):
        one.wait().check()


@pytest.mark.long
def test_who_waits_in_vain_says_for_whom(cluster: Cluster) -> None:
    cluster.environ["PARAMSERVER_CLUSTER__JOIN_TIMEOUT_S"] = "3"
    cluster.addresses.append(free_address())
    worker, server = cluster.worker(), cluster.server()
    for one in (worker, server):
        assert "no coordinator answered at" in complaint(one.wait(), 3)
    cluster.addresses.clear()
    cluster.environ["PARAMSERVER_CLUSTER__JOIN_TIMEOUT_S"] = "12"
    coordinator = cluster.coordinator("--servers", "2", "--workers", "3")
    cluster.server()
    text = complaint(coordinator.wait(), 6)
    assert "1/2 servers; missing: server-1; 0/3 workers; missing: worker-0, worker-1, worker-2" in text


@pytest.mark.long
def test_a_worker_that_is_told_to_end_gives_its_share_back(cluster: Cluster) -> None:
    wanted = reference(cluster.place, "--epochs", "12", "--pace", "0.0")
    summary = cluster.place.work / "out.json"
    cluster.coordinator("--workers", "2", "--set", "training.slices_per_step=4", "--summary", summary)
    cluster.server()
    leaving = cluster.worker("--epochs", "12", "--pace", "0.1")
    staying = cluster.worker("--epochs", "12", "--pace", "0.1")
    cluster.until_status("both train", lambda status: running(status, 2))
    leaving.send(signal.SIGTERM)
    assert leaving.wait(5.0).code == 143
    status = cluster.until_status("one trains", lambda status: running(status, 1), 5.0)
    assert status["lost"] == []
    staying.wait().check()
    cluster.coordinators[0].wait().check()
    same_result(read_summary(summary), wanted)


@pytest.mark.long
def test_a_worker_that_nobody_hears_at_its_end_does_not_end_well(cluster: Cluster) -> None:
    """Its script has done all that it was to do, but no coordinator gathers the result."""
    coordinator = cluster.coordinator("--workers", "1")
    cluster.server()
    cluster.environ["PARAMSERVER_CLUSTER__JOIN_TIMEOUT_S"] = "8"
    worker = cluster.worker("--epochs", "6", "--pace", "0.05")
    cluster.until_status("it trains", lambda status: running(status, 1))
    coordinator.kill()
    assert "no coordinator has heard within 8 s that this script is done" in complaint(worker.wait(), 3)


@pytest.mark.long
def test_drain_and_stop(cluster: Cluster) -> None:
    summary = cluster.place.work / "out.json"
    coordinator = cluster.coordinator("--workers", "2", "--summary", summary)
    server = cluster.server()
    workers = [cluster.worker(*PACED) for _ in range(2)]
    cluster.until_status("both train", lambda status: running(status, 2))
    tell = ("--job", cluster.job)
    nobody = complaint(cluster.place.paramserver("drain", "worker-7", *tell), 2)
    assert "there is no worker or server 'worker-7'" in nobody
    assert "cannot leave" in complaint(cluster.place.paramserver("drain", "server-0", *tell), 2)
    assert "worker-1 has left" in cluster.place.paramserver("drain", "worker-1", *tell).check().out
    status = cluster.status()
    assert [p["name"] for p in status["processes"] if p["role"] == "worker" and not p["gone"]] == ["worker-0"]
    (drained,) = until("a worker has ended", lambda: [worker for worker in workers if worker.ended], 10.0)
    assert "was asked to leave" in drained.wait().check().err
    cluster.place.paramserver("stop", *tell).check()
    for one in (*workers, server, coordinator):
        one.wait(20.0).check()
    assert read_summary(summary)["steps"] > 0
    assert "weights sha256" in coordinator.out


def test_a_failing_script_leaves_the_job_to_others(cluster: Cluster) -> None:
    cluster.coordinator("--workers", "2", "--set", "training.slices_per_step=4")
    cluster.server()
    script = ("--epochs", "3", "--pace", "0.02", "--misbehave", "1:3:raise")
    workers = [cluster.worker(*script), cluster.worker(*script)]
    done = [worker.wait() for worker in workers]
    assert sorted(one.code for one in done) == [0, 1]
    failed = next(one for one in done if one.code)
    assert "the cat sat on the keyboard" in failed.err
    coordinator = cluster.coordinators[0].wait().check()
    assert "worker-1" in coordinator.err
    assert "the cat sat on the keyboard" in coordinator.err
