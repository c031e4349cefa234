"""Blame between machines: a worker behind a slow link, and one that computes slowly, are named with their causes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.blame import SCRIPT
from paramserver.core.blame.causes import Cause
from tests.support.machines.cluster import HEAD, PATIENCE_S, SERVERS, TEST_S, WORKERS, Cluster, Site, processes

pytestmark = pytest.mark.timeout(TEST_S)

MODES = ("sync", "async")
# The gradients of the script take 0.7 s on such a link, and less than 0.1 s without it.
SLOW_MEGABITS = 16.0


class Training:
    """Three workers that mostly sleep, 0.3 s in each slice. ``arguments``: more for the script."""

    def __init__(self, cluster: Cluster, *arguments: str) -> None:
        self.cluster = cluster
        cluster.coordinator()
        for machine in SERVERS:
            cluster.server(machine)
        for machine in WORKERS:
            cluster.start("worker", machine, "--join", cluster.join, "--", SCRIPT, "--slices", "2000", *arguments)
        self.status = cluster.status_when("training", lambda facts: facts["version"] > 2 and _trains(facts))

    def worker_on(self, machine: str) -> str:
        """The name of the worker there."""
        address = self.cluster.network.addresses[machine]
        name: str = processes(self.status, "worker")[address]["name"]
        return name

    def names(self, worker: str, cause: Cause) -> None:
        """Waits until this worker is said to hold the others up most of the time, for this cause."""
        said = f"{worker} held "
        self.cluster.status_when(
            f"{worker} is named for {cause}",
            lambda facts: any(line.startswith(said) and line.endswith(f"for {cause}") for line in facts["blame"]),
        )


def _trains(facts: dict[str, Any]) -> bool:
    return facts["state"] == "training" and len(processes(facts, "worker")) == len(WORKERS)


def settings(mode: str) -> dict[str, object]:
    return {"training.slices_per_step": 3, "consistency.mode": mode, "consistency.staleness": 1}


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_behind_a_slow_link_is_named(site: Site, mode: str) -> None:
    with Cluster(site, settings(mode)) as cluster:
        training = Training(cluster)
        site.network.limit_one(WORKERS[1], SLOW_MEGABITS)
        try:
            training.names(training.worker_on(WORKERS[1]), Cause.LINK)
        finally:
            site.network.unlimit_one(WORKERS[1])
        _stop(cluster)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_computes_slowly_is_named(site: Site, mode: str) -> None:
    """It is the worker of rank 1, on whichever machine."""
    with Cluster(site, settings(mode)) as cluster:
        Training(cluster, "--compute", "little", "--always").names("worker-1", Cause.COMPUTE)
        _stop(cluster)


def _stop(cluster: Cluster) -> None:
    cluster.command("stop").wait(PATIENCE_S).check()
    cluster.processes[f"coordinator@{HEAD}"].wait(PATIENCE_S).check()
