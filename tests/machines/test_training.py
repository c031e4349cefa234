"""Six machines train the digits and get what the local cluster gets, in both modes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import DIGITS, Done
from tests.support.machines.cluster import (
    EPOCHS,
    HEAD,
    PACED,
    PATIENCE_S,
    PROXIES,
    SERVERS,
    SLICES,
    STEPS,
    TEST_S,
    WORKERS,
    Cluster,
    Site,
    arguments,
    digests,
    processes,
)
from tests.support.machines.stranger import ask

pytestmark = pytest.mark.timeout(TEST_S)

MEGABITS = 100.0


class Seen:
    """One job over TLS, whose processes start in the worst order: workers first, servers last."""

    def __init__(self, site: Site) -> None:
        with Cluster(site) as cluster:
            for machine in WORKERS:
                cluster.worker(machine, script=PACED)
            for machine in WORKERS:
                cluster.processes[machine].wait_for_err(f"waiting for the coordinator at {cluster.join} (")
            coordinator = cluster.coordinator()
            coordinator.wait_for_err("waiting for 0/2 servers; missing: server-0, server-1")
            for machine in SERVERS:
                cluster.server(machine)
            self.status = cluster.status_when("training", lambda facts: facts["state"] == "training")
            self.pids = {running.pid for running in cluster.processes.values()}
            self.machine_pids = {pid for machine in (*SERVERS, *WORKERS) for pid in site.network.pids(machine)}
            self.arguments = [arguments(pid) for pid in self.pids]
            self.environments = [Path(f"/proc/{pid}/environ").read_bytes().decode() for pid in self.pids]
            cluster.hurry()
            self.done: dict[str, Done] = cluster.finish()
            self.summary = cluster.summary()
            self.addresses = site.network.addresses
            self.join = cluster.join


@pytest.fixture(scope="module")
def seen(site: Site) -> Seen:
    return Seen(site)


def test_sync_gives_the_digests_of_the_local_cluster(seen: Seen, local_run: dict[str, Any]) -> None:
    assert digests(seen.summary) == digests(local_run)
    assert len(set(digests(seen.summary))) == 3
    counts = {name: seen.summary[name] for name in ("mode", "servers", "workers", "steps", "contributions_applied")}
    expected = {"mode": "sync", "servers": 2, "workers": 3, "steps": STEPS, "contributions_applied": EPOCHS * SLICES}
    assert counts == expected
    assert seen.summary["weights_sha256"] in seen.done[f"coordinator@{HEAD}"].out


def test_the_coordinator_prints_the_lines_for_the_other_machines(seen: Seen) -> None:
    said = seen.done[f"coordinator@{HEAD}"].out
    assert f"paramserver start server --restart --join {seen.join} --certs DIRECTORY" in said
    assert f"paramserver start worker --restart --join {seen.join} --certs DIRECTORY -- SCRIPT ARGUMENTS" in said


def test_members_are_known_by_the_address_of_their_route_to_the_coordinator(seen: Seen) -> None:
    """No address was ever configured but the coordinator's."""
    servers, workers = processes(seen.status, "server"), processes(seen.status, "worker")
    assert set(servers) == {seen.addresses[machine] for machine in SERVERS}
    assert set(workers) == {seen.addresses[machine] for machine in WORKERS}
    assert {p["name"] for p in servers.values()} == {"server-0", "server-1"}
    assert {p["name"] for p in workers.values()} == {"worker-0", "worker-1", "worker-2"}
    assert seen.status["security"] == "tls"


def test_each_process_runs_where_it_should(seen: Seen) -> None:
    assert {p["pid"] for role in ("server", "worker") for p in processes(seen.status, role).values()} <= seen.pids
    assert len(seen.machine_pids & seen.pids) == len(SERVERS) + len(WORKERS)


def test_a_proxy_in_the_environment_is_not_used(seen: Seen, site: Site) -> None:
    """All processes had it, and a stock client of gRPC with it reaches nobody."""
    assert len(seen.environments) == 6
    for environment in seen.environments:
        assert {f"{name}={value}" for name, value in PROXIES.items()} <= set(environment.split("\0"))
    with Cluster(site) as cluster:
        cluster.coordinator().wait_for("coordinator of job")
        cases = [{"trust": "own", "identity": "own", "token": "right"}]
        assert ask(cluster, WORKERS[0], cases, PROXIES)[0]["code"] == "UNAVAILABLE"
        assert ask(cluster, WORKERS[0], cases)[0]["code"] == "OK"


def test_nothing_secret_is_in_the_arguments_of_a_process(seen: Seen, site: Site) -> None:
    assert [" start " in line for line in seen.arguments] == [True] * 6
    assert not [line for line in seen.arguments if any(secret in line for secret in site.secrets)]


def test_async_counts_every_slice_once_also_when_a_worker_is_drained(site: Site) -> None:
    with Cluster(site, {"consistency.mode": "async"}) as cluster:
        cluster.everybody(PACED)
        facts = cluster.status_when("training", lambda facts: facts["state"] == "training")
        name = processes(facts, "worker")[site.network.addresses[WORKERS[2]]]["name"]
        assert f"{name} has left." in cluster.command("drain", name).wait().check().out
        cluster.processes[WORKERS[2]].wait(PATIENCE_S).check()
        cluster.hurry()
        cluster.finish()
        summary = cluster.summary()
    assert (summary["mode"], summary["staleness"]) == ("async", 3)
    assert summary["contributions_applied"] == EPOCHS * SLICES
    assert summary["metrics"]["test_accuracy"] > 0.8


def test_without_tls_nobody_starts_and_with_insecure_everybody_warns(site: Site, local_run: dict[str, Any]) -> None:
    network = site.network
    join = ("--join", f"{network.addresses[HEAD]}:8790")
    refused = [
        site.command(HEAD, "start", "coordinator", "--listen", network.addresses[HEAD], "--store", "memory"),
        site.command(SERVERS[0], "start", "server", *join),
        site.command(WORKERS[0], "start", "worker", *join, "--", DIGITS),
    ]
    for running in refused:
        done = running.wait().check(2)
        assert "takes TLS and a token, and TLS and a token are not configured" in done.err
        assert "--insecure" in done.err
    with Cluster(site, insecure=True) as cluster:
        cluster.everybody()
        ended = cluster.finish()
        assert ["INSECURE: " in done.err for done in ended.values()] == [True] * 6
        assert f"at {cluster.join} (no TLS)" in ended[f"coordinator@{HEAD}"].out
        assert digests(cluster.summary()) == digests(local_run)


def test_slow_cables_change_nothing_but_the_time(site: Site, local_run: dict[str, Any]) -> None:
    network = site.network
    limited = os.environ.get("MACHINES_MEGABITS")
    network.limit(MEGABITS)
    try:
        measured = network.megabits_per_s(WORKERS[0], SERVERS[0], megabytes=4)
        assert measured < MEGABITS * 1.2
        waited = network.delayed_by_limit()
        with Cluster(site) as cluster:
            cluster.everybody()
            cluster.finish()
            summary = cluster.summary()
        assert network.delayed_by_limit() > waited
        assert digests(summary) == digests(local_run)
        for name, found in (("local cluster", local_run), (f"six machines, {measured:.0f} Mbit/s", summary)):
            print(
                f"{name}: {1000 * found['seconds'] / found['steps']:.0f} ms a step, {found['samples_per_s']} samples/s"
            )
    finally:
        if limited:
            network.limit(float(limited))
        else:
            network.unlimit()
