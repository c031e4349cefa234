"""Machines that are cut off for longer than a lease, in the middle of training, and come back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.machines.cluster import (
    EPOCHS,
    LEASE_S,
    PACED,
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

# A step of the paced workers: each computes two slices of 0.3 s.
STEP_S = 0.8


def version(facts: dict[str, Any]) -> int:
    """The oldest version of a live worker."""
    return min((int(p["version"]) for p in alive(facts, "worker").values()), default=0)


def alive(facts: dict[str, Any], role: str) -> dict[str, dict[str, Any]]:
    """The members of a role, by host."""
    return {host: p for host, p in processes(facts, role).items() if not p["gone"]}


def in_training(cluster: Cluster) -> dict[str, Any]:
    """A status from the middle of training, with everybody there."""
    return cluster.status_when(
        "training", lambda facts: version(facts) >= 3 and len(alive(facts, "worker")) == len(WORKERS)
    )


class Away:
    """A machine that is cut off: ``with Away(...)`` begins once others have missed it, and heals it at the end."""

    def __init__(self, cluster: Cluster, machine: str, how: Cut, name: str) -> None:
        self._cluster = cluster
        self._machine = machine
        self._how = how
        self._name = name
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Away:
        network = self._cluster.network
        network.cut(self._machine, self._how)
        self._before, self._since = network.traffic(self._machine), time.monotonic()
        self.facts = self._cluster.status_when("it is missed", lambda facts: self._name in facts["lost"])
        return self

    def __exit__(self, *_: object) -> None:
        """It was away for longer than a lease, and nothing has got through."""
        network = self._cluster.network
        now = network.traffic(self._machine)
        assert now.received == self._before.received
        if self._how is Cut.SILENT:
            assert now.sent > self._before.sent
        assert time.monotonic() - self._since > LEASE_S
        network.heal(self._machine)


def test_a_worker_is_cut_off_and_takes_part_again(site: Site, local_run: dict[str, Any]) -> None:
    """Its slices go to the others meanwhile."""
    machine, host = WORKERS[1], site.network.addresses[WORKERS[1]]
    with Cluster(site) as cluster:
        cluster.everybody(PACED)
        before = processes(in_training(cluster), "worker")[host]
        with Away(cluster, machine, Cut.SILENT, before["name"]) as away:
            assert host not in alive(away.facts, "worker")
            reached = version(away.facts)
            cluster.status_when("the others go on", lambda facts: version(facts) >= reached + 3)
        cluster.processes[machine].wait_for_err("was given up for lost; it joins again")
        back = cluster.status_when("it is back", lambda facts: host in alive(facts, "worker"))
        slices = processes(back, "worker")[host]["slices"]
        assert slices >= before["slices"]
        cluster.status_when("it takes part", lambda facts: processes(facts, "worker")[host]["slices"] > slices + 1)
        cluster.hurry()
        cluster.finish()
        assert digests(cluster.summary()) == digests(local_run)
        assert cluster.summary()["contributions_applied"] == EPOCHS * SLICES


def replicated(facts: dict[str, Any]) -> bool:
    """Whether each shard has its backup."""
    return bool(facts.get("shards")) and all(shard["state"] == "replicated" for shard in facts["shards"])


def test_a_server_is_cut_off_and_another_one_goes_on_with_its_shards(site: Site, local_run: dict[str, Any]) -> None:
    """There is a next version lease + 0.5 s after the cut, at the latest. It comes back and is a backup again."""
    machine, host = SERVERS[1], site.network.addresses[SERVERS[1]]
    with Cluster(site) as cluster:
        cluster.everybody(PACED)
        in_training(cluster)
        facts = cluster.status_when("all shards have backups", replicated)
        before, cut_at = processes(facts, "server")[host], time.monotonic()
        with Away(cluster, machine, Cut.SILENT, before["name"]) as away:
            assert "its shards" in away.facts["reason"]
            reached = version(away.facts)
            cluster.status_when("training goes on", lambda facts: version(facts) > reached)
            # `status --watch` is asked once a second, and a step takes as long as the pace says.
            assert time.monotonic() - cut_at <= LEASE_S + 0.5 + 2.0 + STEP_S
            cluster.status_when("and on", lambda facts: version(facts) > reached + 3)
        cluster.processes[machine].wait_for_err("other servers hold its shards: it drops them")
        back = cluster.status_when("all shards have backups again", lambda f: not f["lost"] and replicated(f))
        assert processes(back, "server")[host]["pid"] == before["pid"], "it was not started again"
        cluster.hurry()
        cluster.finish()
        summary = cluster.summary()
        assert (summary["rollbacks"], summary["takeovers"], summary["repairs"]) == (0, 1, 1)
        assert digests(summary) == digests(local_run)
        assert summary["contributions_applied"] == EPOCHS * SLICES


def test_a_server_without_backups_is_cut_off_and_the_job_waits_for_it(site: Site, local_run: dict[str, Any]) -> None:
    machine, host = SERVERS[1], site.network.addresses[SERVERS[1]]
    with Cluster(site, {"cluster.replicas": 0}) as cluster:
        cluster.everybody(PACED)
        before = processes(in_training(cluster), "server")[host]
        log = cluster.processes["coordinator@head"]
        with Away(cluster, machine, Cut.PULLED, before["name"]) as away:
            log.wait_for_err("a server is gone; the job waits for it")
            log.wait_for_err(f"waiting for {before['name']} at {before['address']} to come back")
            # Nobody can have more than the step that was under way.
            reached = version(away.facts)
            assert version(cluster.status_when("a status", lambda facts: True)) <= reached + 1
        log.wait_for_err("a server is back")
        cluster.status_when("training goes on", lambda facts: version(facts) > reached + 2)
        cluster.hurry()
        cluster.finish()
        assert digests(cluster.summary()) == digests(local_run)
        assert cluster.summary()["contributions_applied"] == EPOCHS * SLICES


def test_async_a_worker_and_then_a_server_are_cut_off(site: Site) -> None:
    """Every slice counts once all the same."""
    hosts = site.network.addresses
    with Cluster(site, {"consistency.mode": "async"}) as cluster:
        cluster.everybody(PACED)
        facts = in_training(cluster)
        name = processes(facts, "worker")[hosts[WORKERS[0]]]["name"]
        with Away(cluster, WORKERS[0], Cut.PULLED, name) as away:
            done = sum(p["slices"] for p in alive(away.facts, "worker").values())
            cluster.status_when(
                "the others go on", lambda facts: sum(p["slices"] for p in alive(facts, "worker").values()) > done + 3
            )
        cluster.status_when("it is back", lambda facts: hosts[WORKERS[0]] in alive(facts, "worker"))
        name = processes(facts, "server")[hosts[SERVERS[0]]]["name"]
        cluster.status_when("all shards have backups", replicated)
        with Away(cluster, SERVERS[0], Cut.SILENT, name) as away:
            done = version(away.facts)
            cluster.status_when("the other server goes on", lambda facts: version(facts) > done)
        cluster.status_when("all shards have backups again", lambda f: not f["lost"] and replicated(f))
        cluster.hurry()
        cluster.finish()
        assert cluster.summary()["contributions_applied"] == EPOCHS * SLICES
        assert cluster.summary()["metrics"]["test_accuracy"] > 0.8
