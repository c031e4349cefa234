"""Several servers of one command: beside a worker, and more than one on a host."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import read_summary, until
from tests.support.integration.roles import Cluster, alive, cluster_fixture, reference, same_result


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def children(pid: int) -> list[int]:
    """The processes that this one has started from its main thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_servers_beside_workers_and_two_on_a_host(cluster: Cluster) -> None:
    script = ("--optimizer", "adamw", "--epochs", "2")
    wanted = reference(cluster.place, *script)
    summary = cluster.place.work / "out.json"
    split = ("--set", "cluster.placement=split", "--set", "training.chunk_bytes=256")
    cluster.coordinator(
        *("--servers", "4", "--workers", "2", "--set", "training.slices_per_step=4", "--summary", summary), *split
    )
    for _ in range(2):
        cluster.worker(*script, flags=("--with-server",))
    cluster.server("--servers-per-host", "2")
    cluster.ended()
    same_result(read_summary(summary), wanted)
    assert cluster.place.leftovers() == []


@pytest.mark.long
def test_whoever_is_told_to_end_takes_its_servers_along(cluster: Cluster) -> None:
    cluster.coordinator("--servers", "3", "--workers", "1")
    worker = cluster.worker("--epochs", "100000", "--pace", "0.05", flags=("--with-server",))
    server = cluster.server("--servers-per-host", "2")
    cluster.until_status("it trains", lambda status: status["state"] == "training")
    started = [*children(worker.pid), *children(server.pid)]
    assert len(started) == 2 * 3  # each with a guard: a worker and its server, two servers
    for one in (worker, server):
        one.send(signal.SIGTERM)
        assert one.wait(30.0).code == 143
    until("their servers have ended", lambda: not any(map(alive, started)), 10.0)
