"""Roles started one by one with flags that make no sense, or with settings other than those of the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import complaint
from tests.support.integration.roles import Cluster, cluster_fixture


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def test_settings_come_from_the_coordinator_and_others_are_refused(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(
        "--workers", "1", "--mode", "async", "--staleness", "2", "--set", "training.seed=5"
    )
    refused = {
        "training.seed is 6 here": "training.seed=6",
        "consistency.mode = sync": "consistency.mode=sync",
        "cluster.job is another here": "cluster.job=another",
    }
    workers = {text: cluster.worker("--epochs", "1", flags=("--set", one)) for text, one in refused.items()}
    for text, worker in workers.items():
        assert text in complaint(worker.wait(), 2)
    cluster.workers.clear()
    cluster.server()
    cluster.worker("--epochs", "1")
    cluster.ended()
    assert "async, staleness 2" in coordinator.out


def test_bad_flags(cluster: Cluster, tmp_path: Path) -> None:
    def refused(*tokens: str) -> str:
        return complaint(cluster.place.paramserver("start", *tokens), 2)

    assert "say --join HOST:PORT" in refused("server")
    assert "say --join HOST:PORT" in refused("worker", "--", "x.py")
    assert "does not exist" in refused("worker", "--join", "127.0.0.1:1", "--", "x.py")
    assert "contradict each other" in refused("coordinator", "--resume", "--fresh")
    assert "cluster.coordinator" in refused("server", "--join", "nowhere")
    assert "no address of this machine" in refused("coordinator", "--set", "cluster.coordinator=192.0.2.1:8790")
    assert "certs init" in refused("coordinator", "--listen", "0.0.0.0:0")
