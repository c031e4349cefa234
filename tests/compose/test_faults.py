"""Workers that come and go, and a coordinator that is restarted, while the job trains: the same bits all the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.compose.harness import Cluster, digests, run, until

pytestmark = pytest.mark.timeout(2400)

# Long enough that all of this happens while it trains.
EPOCHS, FEWER = 600, 240
LONG = f"workers/digits.py --epochs {EPOCHS}"
SHORTER = f"workers/digits.py --epochs {FEWER}"
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


def checkpoints(cluster: Cluster) -> list[str]:
    """The complete checkpoints in the volume, oldest first; as another container sees them, too."""
    listing = cluster.admin("checkpoint", "list", "/data/checkpoints", "--json", check=False)
    found = json.loads(listing.out) if listing.code == 0 else []
    return sorted(one["name"] for one in found if one["good"])


def replicated(cluster: Cluster) -> bool:
    """Whether each shard has its backup. The job must not have ended by then."""
    status = cluster.status()
    assert status.get("state") != "done", "the job was over too early for this test: it needs more epochs"
    shards = status.get("shards", [])
    return bool(shards) and all(shard["state"] == "replicated" for shard in shards)


def newest(cluster: Cluster) -> int:
    """The newest version that a server has; 0 while nobody answers."""
    return max((one["version"] for one in cluster.status().get("processes", []) if one["role"] == "server"), default=0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_server_costs_no_step(image: str, local: Local, mode: str) -> None:
    """With the shipped file the other server has copies of its shards, and goes on with them."""
    variables = {"PARAMSERVER_CHECKPOINT__EVERY_S": "2", "PARAMSERVER_CONSISTENCY__MODE": mode}
    epochs, script = (EPOCHS, LONG) if mode == "sync" else (FEWER, SHORTER)  # then each slice is an update
    with Cluster(SCRIPT=script, **variables) as cluster:
        cluster.up()
        until("a checkpoint was made by time", lambda: len(checkpoints(cluster)) > 1)
        server = cluster.one("server")
        seen = set(server.exec("ls", "/data/checkpoints").out.split())
        assert seen & set(checkpoints(cluster)), "servers see the coordinator's directory"
        until("all shards have backups", lambda: replicated(cluster))
        version = newest(cluster)
        run("docker", "kill", server.id)
        until("it is missed", lambda: cluster.status().get("state") == "degraded")
        # Docker does not start again what was killed like this: people are told what to type.
        missed = cluster.status()
        assert f"docker start {server.id[:12]}" in missed["reason"]
        assert "holds its shards" in missed["reason"]
        assert {shard["state"] for shard in missed["shards"]} == {"no backup"}
        until("training goes on without it", lambda: newest(cluster) > version + 5)
        run("docker", "start", server.id)
        until("all shards have backups again", lambda: replicated(cluster))
        summary = cluster.result()
        assert (summary["rollbacks"], summary["steps_redone"]) == (0, 0)
        assert (summary["takeovers"], summary["repairs"]) == (1, 1)
        assert summary["checkpoint"] in checkpoints(cluster)
    # Of 43 slices.
    assert summary["contributions_applied"] == epochs * 43
    assert mode == "async" or digests(summary) == digests(local(script))


def test_the_loss_of_everything_is_survived(image: str, local: Local) -> None:
    with Cluster(SCRIPT=LONG, PARAMSERVER_CHECKPOINT__EVERY_S="2") as cluster:
        cluster.up()
        until("a checkpoint was made by time", lambda: len(checkpoints(cluster)) > 1)
        cluster.compose("kill")
        assert not any(one.running for one in cluster.containers())
        cluster.up()
        summary = cluster.result()
        assert summary["rollbacks"] >= 1
    assert digests(summary) == digests(local(LONG))


def test_another_training_keeps_the_checkpoints_of_the_first(image: str) -> None:
    """docker-compose stop, then up, as docs/docker.md says."""
    with Cluster(SCRIPT="workers/digits.py --epochs 1") as cluster:
        cluster.up()
        first = cluster.result()["checkpoint"]
        cluster.compose("stop")
        cluster.up()
        until("the second job has ended", lambda: cluster.status().get("state") == "done" and checkpoints(cluster))
        assert first in cluster.one("coordinator").exec("ls", "/data/checkpoints.old-1").out.split()
