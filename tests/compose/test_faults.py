"""Workers that come and go, and a coordinator that is restarted, while the job trains: the same bits all the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.compose.harness import Cluster, digests, run, until

pytestmark = pytest.mark.timeout(2400)

# Long enough that all of this happens while it trains.
LONG = "workers/digits.py --epochs 150"
SHORTER = "workers/digits.py --epochs 60"
Local = Callable[[str], dict[str, Any]]


def test_workers_come_and_go(image: str, local: Local) -> None:
    with Cluster(SCRIPT=LONG) as cluster:
        cluster.up()
        cluster.wait_for_version(20)
        old = {container.id for container in cluster.containers("worker")}
        assert len(old) == 2

        # New certificates, which those who come later show to those who have the old ones.
        before = cluster.one("server").exec("cat", "/certs/server.crt").out
        cluster.compose("run", "--rm", "certs", "--renew")
        assert cluster.one("server").exec("cat", "/certs/server.crt").out != before

        cluster.up("--scale", "worker=4")
        new = [one for one in cluster.containers("worker") if one.id not in old]
        assert len(new) == 2
        until(
            "four workers train", lambda: len(cluster.workers()) == 4 and all(w["samples"] for w in cluster.workers())
        )

        # One dies, and nobody starts it again.
        killed = new[0]
        run("docker", "kill", killed.id)
        until("three workers train", lambda: len(cluster.workers()) == 3)
        assert (killed.exit_code, killed.running) == (137, False)

        # One is stopped: it gives its slices back and leaves within the grace period, in fact at once.
        begun = time.monotonic()
        run("docker", "stop", new[1].id)
        seconds = time.monotonic() - begun
        assert seconds < 25.0
        assert new[1].exit_code == 143
        until("two workers train", lambda: len(cluster.workers()) == 2)

        # One crashes, and is started again by its restart policy.
        crashed = cluster.one("worker")
        assert crashed.id in old
        crashed.crash()
        until("it was started again", lambda: crashed.restarts == 1)
        until("two workers train again", lambda: len(cluster.workers()) == 2)
        status = cluster.status()
        assert status["state"] in ("training", "degraded"), (
            "the job was over too early for this test: it needs more epochs"
        )
        version = min(one["version"] for one in status["processes"] if one["role"] == "server")
        print(f"\nlost {status['lost']}, version {version}, docker stop took {seconds:.1f} s")

        summary = cluster.result()
    assert digests(summary) == digests(local(LONG))


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_the_coordinator_is_restarted(image: str, local: Local, how: str) -> None:
    with Cluster(SCRIPT=SHORTER) as cluster:
        cluster.up()
        cluster.wait_for_version(20)
        coordinator, term = cluster.one("coordinator"), cluster.status()["term"]
        if how == "restart":
            cluster.compose("restart", "coordinator")
        else:
            coordinator.crash()
            until("it was started again", lambda: coordinator.restarts == 1)
        until("a new term has begun", lambda: cluster.status().get("term", 0) > term)
        status = cluster.status()
        assert status["state"] in ("training", "degraded"), (
            "the job was over too early for this test: it needs more epochs"
        )
        assert len(cluster.workers()) == 2
        summary = cluster.result()
        assert all(one.restarts == 0 for service in ("server", "worker") for one in cluster.containers(service))
    assert digests(summary) == digests(local(SHORTER))
