"""The coordinator's machine fails; another machine has a coordinator that stands by."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.support.machines.cluster import (
    EPOCHS,
    HEAD,
    PACED,
    PORT,
    SERVERS,
    SLICES,
    TEST_S,
    WORKERS,
    Cluster,
    Site,
    digests,
    processes,
)
from tests.support.machines.network import Cut

pytestmark = pytest.mark.timeout(TEST_S)


def two_coordinators(site: Site, first: str, second: str) -> Cluster:
    """A job that ``first`` leads; ``second`` stands by."""
    cluster = Cluster(site)
    cluster.join = ",".join(f"{site.network.addresses[machine]}:{PORT}" for machine in (first, second))
    cluster.coordinator(machine=first).wait_for("coordinator of job")
    cluster.coordinator(machine=second)
    cluster.members(PACED)
    return cluster


def training(facts: dict[str, Any]) -> bool:
    """Everybody is there, and has done some steps."""
    workers = processes(facts, "worker").values()
    return len(workers) == len(WORKERS) and min(p["version"] for p in workers) >= 3


def test_a_coordinator_dies_and_the_one_on_another_machine_takes_over(site: Site, local_run: dict[str, Any]) -> None:
    standby = SERVERS[1]
    with two_coordinators(site, HEAD, standby) as cluster:
        facts = cluster.status_when("training", training)
        assert facts["term"] == 1
        cluster.processes.pop(f"coordinator@{HEAD}").kill()
        cluster.processes[f"coordinator@{standby}"].wait_for_err("took over")
        facts = cluster.status_when("the second term", lambda now: now["term"] == 2 and now["state"] == "training")
        assert processes(facts, "coordinator").keys() == {site.network.addresses[standby]}
        cluster.hurry()
        cluster.finish()
        assert not cluster.summary_path(HEAD).exists()
        assert digests(cluster.summary(standby)) == digests(local_run)
        assert cluster.summary(standby)["contributions_applied"] == EPOCHS * SLICES


def test_a_coordinator_that_was_cut_off_steps_down(site: Site, local_run: dict[str, Any]) -> None:
    """Nothing is lost, and nothing counts twice.

    1. The coordinator leads from the machine of a worker; a standby is on the machine of the store.
    2. That machine is cut off. Neither side can reach the other, and both have a coordinator.
    3. The standby leads in a second term, and the other two workers go on.
    4. The machine is healed: the old coordinator steps down, the worker joins the new one, and the bits are the same.
    """
    lone, host = WORKERS[0], site.network.addresses[WORKERS[0]]
    with two_coordinators(site, lone, HEAD) as cluster:
        cluster.status_when("training", training)
        before = site.network.traffic(lone)
        site.network.cut(lone, Cut.SILENT)
        cluster.processes[f"coordinator@{HEAD}"].wait_for_err("took over")
        old = cluster.processes[f"coordinator@{lone}"]
        assert site.network.traffic(lone).sent > before.sent
        facts = cluster.status_when("the second term", lambda facts: facts["term"] == 2)
        reached = max(p["version"] for p in processes(facts, "worker").values())
        cluster.status_when(
            "the others go on",
            lambda facts: max(p["version"] for p in processes(facts, "worker").values()) > reached + 2,
        )
        assert "steps down" not in old.err
        site.network.heal(lone)
        old.wait_for_err("this coordinator steps down")
        cluster.status_when(
            "the lone worker is back",
            lambda facts: host in processes(facts, "worker") and not processes(facts, "worker")[host]["gone"],
        )
        cluster.hurry()
        for running in cluster.processes.values():
            if running is not old:
                running.wait().check()
        old.send(signal.SIGTERM)
        old.wait()
        assert cluster.summary(HEAD)["contributions_applied"] == EPOCHS * SLICES
        assert not cluster.summary_path(lone).exists()
        assert digests(cluster.summary(HEAD)) == digests(local_run)
