"""Servers are cut off again and again, each for longer than its lease: the backups' machine goes on in time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import history
from tests.support.faults.cases import ASYNC_SLICES, SLICES, STEPS, Job
from tests.support.faults.history import Seen
from tests.support.faults.runs import SCRIPT, Bench
from tests.support.machines.cluster import LEASE_S, PATIENCE_S, SERVERS, WORKERS, Cluster, Site, digests, processes
from tests.support.machines.network import Cut

# How many cuts; docs/reliability.md has the figures of 50.
CUTS = int(os.environ.get("MACHINES_CUTS", "2"))
# Steps, or asynchronous slices, of 20 ms and more, that go by between two cuts at most.
_BETWEEN = {"sync": 300, "async": 1800}
# After the lease: the takeover, and a step.
_MORE_S = 0.5
_PACE_S = 0.02

pytestmark = pytest.mark.timeout(120.0 + CUTS * 60.0)


def replicated(facts: dict[str, Any]) -> bool:
    """Whether each shard has its backup, and each server is there."""
    assert facts["state"] != "done", "the job was over too early for this test: it needs more epochs"
    return bool(facts.get("shards")) and all(one["state"] == "replicated" for one in facts["shards"])


def waits(seen: Sequence[Seen], cuts: Sequence[float]) -> list[float]:
    """For each cut, the longest time after it, before the next one, in which no worker had a new version."""
    found = []
    for moment, following in zip(cuts, [*cuts[1:], float("inf")], strict=True):
        newest, last, longest = -1, moment, 0.0
        for one in (one for one in seen if moment - 1.0 < one.at < min(following, moment + 3 * LEASE_S)):
            if min(one.versions) > newest:
                longest = max(longest, one.at - max(last, moment))
                newest, last = min(one.versions), one.at
        assert newest >= 0, "nobody trained after the cut"
        found.append(longest)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cut_costs_a_lease_and_half_a_second(site: Site, tmp_path: Path, mode: str) -> None:
    job = Job(mode, 3, -(-2 * CUTS * _BETWEEN[mode] // (STEPS if mode == "sync" else ASYNC_SLICES)), _PACE_S, False)
    settings = {
        "consistency.mode": mode,
        "training.slices_per_step": SLICES if mode == "sync" else 0,
        "training.seed": 0,
        "training.chunk_bytes": 64,
    }
    seen_by_all, hurry = tmp_path / "history", tmp_path / "hurry"
    words = ["--epochs", str(job.epochs), "--pace", str(job.pace_s), "--until", str(hurry)]
    words += ["--history", str(seen_by_all), *(["--ledger"] if mode == "async" else [])]
    chance, cuts = random.Random(CUTS), list[float]()
    with Cluster(site, settings) as cluster:
        cluster.coordinator()
        for machine in SERVERS:
            cluster.server(machine)
        for machine in WORKERS:
            cluster.start("worker", machine, "--join", cluster.join, "--", str(SCRIPT), *words)
        for number in range(CUTS):
            machine = SERVERS[number % len(SERVERS)]
            facts = cluster.status_when("all shards have backups", replicated)
            name = processes(facts, "server")[site.network.addresses[machine]]["name"]
            time.sleep(chance.uniform(0.0, 0.5))
            cuts.append(time.time())
            site.network.cut(machine, Cut.SILENT)
            cluster.status_when("it is missed", lambda facts, name=name: name in facts["lost"])  # type: ignore[misc]
            site.network.heal(machine)
        cluster.status_when("all shards have backups again", replicated)
        hurry.touch()
        cluster.finish(PATIENCE_S + 0.02 * job.contributions)
        summary = cluster.summary()
    seen = history.read(seen_by_all)
    found = sorted(waits(seen, cuts))
    print(f"\n{mode}: {CUTS} cuts, without a new version for {' '.join(f'{one:.2f}' for one in found)} s")
    assert (summary["rollbacks"], summary["steps_redone"], summary["takeovers"]) == (0, 0, CUTS)
    assert summary["contributions_applied"] == job.contributions
    twin, quiet = Bench().twin(job)
    if mode == "sync":
        assert digests(summary) == digests(twin)
    else:
        assert summary["weights_sha256"] == twin["weights_sha256"]
    assert not history.problems(seen, quiet if mode == "sync" else (), None if mode == "sync" else job.epochs)
    assert min(found) > LEASE_S / 2, "a cut that nobody missed"
    assert found[-1] <= LEASE_S + _MORE_S
