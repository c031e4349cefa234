"""Simulated hosts with several workers, which push and pull once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.errors import ConfigError
from paramserver.simulate.cluster import simulate
from paramserver.simulate.events import parse as event
from paramserver.simulate.machinery.blame import Part
from paramserver.simulate.parts.stragglers import parse as straggler
from paramserver.simulate.scenario import Scenario
from tests.support.costs import FREE

# Two hosts with four workers each: the model takes 0.8 s on a link of 100 Mb/s.
JOB = Scenario(
    workers=8,
    servers=2,
    params=2_500_000,
    compute_s=1e-3,
    bandwidth=100e6 / 8,
    steps=12,
    workers_per_host=4,
    costs=FREE,
)
MODEL_S = 0.8


def step_s(job: Scenario, **changes: Any) -> float:
    """The usual time between two versions: each worker pulls the first one by itself."""
    published_at = simulate(replace(job, **changes))[1].published_at
    return median(after - before for before, after in pairwise(published_at))


def test_a_host_pushes_and_pulls_once() -> None:
    """Each way carries the model once for each host; otherwise four times."""
    assert MODEL_S <= step_s(JOB) <= 1.15 * MODEL_S
    assert 4 * MODEL_S <= step_s(JOB, host_tier="off") <= 1.15 * 4 * MODEL_S


def test_backups_take_their_part_of_the_links_of_servers() -> None:
    """Each of two servers sends the sum for its half to the other one, besides half of the model to each host."""
    assert 1.5 * MODEL_S <= step_s(JOB, replicas=1) <= 1.2 * 1.5 * MODEL_S


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "grpc"},
        {"params": 200_000},
        {"consistency": Consistency(Mode.ASYNC, 2)},
        {"workers_per_host": 1},
    ],
    ids=["grpc", "small", "async", "one worker"],
)
def test_where_workers_push_by_themselves(changes: dict[str, Any]) -> None:
    """The same conditions as in a job: two ways of pushing would not come out equal to the last digit."""
    job = replace(JOB, steps=3, **changes)
    assert step_s(job) == step_s(job, host_tier="off")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workers": 9, "slices": 27},  # the last host has one worker
        {"workers": 6, "workers_per_host": 3},  # the slices of a host are several nodes of the tree
        {"moves": False},
        {"stragglers": (straggler("exp:0.5"),), "compute_s": 0.5},
        {"stragglers": (straggler("slow:1x6"),), "compute_s": 0.5, "slices": 32},
        {"cores": 2.0, "compute_s": 0.2},
    ],
    ids=["all", "a worker alone", "several nodes", "still", "late", "slow", "few cores"],
)
def test_every_slice_counts_once_in_each_step_and_the_parts_add_up(changes: dict[str, Any]) -> None:
    job = replace(JOB, **changes)
    outcome, record = simulate(job)
    assert len(record.published_at) == job.steps
    assert job.steps * job.slices <= record.applied < (job.steps + 1) * job.slices
    # The chain of each version says for every second what it was spent on.
    assert [sum(chain) for chain in record.chains] == pytest.approx(record.published_at, rel=1e-6)
    assert outcome.step_parts[Part.WORKER_LINK] + outcome.step_parts[Part.SERVER_LINK] > 0


def test_sums_of_hosts_are_brought_again_to_a_shard_that_has_moved() -> None:
    events = (event("kill:1@5s"), event("start:1@12s"))
    _, record = simulate(replace(JOB, replicas=1, steps=16, events=events))
    assert len(record.published_at) == 16
    assert len(record.happened) > len(events)
    assert record.again > 0


def test_a_host_does_not_wait_long_for_a_worker_that_is_always_late() -> None:
    """It takes five times as long for its slice: others compute slices of it, and push them by themselves."""
    slow = {"stragglers": (straggler("slow:1x5"),), "compute_s": 2.0, "slices": 24, "steps": 6, "bandwidth": 1e9 / 8}
    assert step_s(JOB, **slow) <= 1.1 * step_s(JOB, host_tier="off", **slow)


def test_sums_take_time_of_the_processors() -> None:
    """Of four contributions two sums are made side by side, and then the sum of both."""
    slow = replace(FREE, sum_ns=100.0)  # 0.25 s for two gradients
    fast = step_s(JOB, bandwidth=1e12)
    assert step_s(JOB, bandwidth=1e12, costs=slow) - fast == pytest.approx(0.5 + 2 * 0.25 / 2, rel=0.3)


@pytest.mark.parametrize(
    "changes", [{"workers_per_host": 0}, {"hosts": 2}, {"with_server": True, "servers": 8}], ids=str
)
def test_workers_of_a_host_have_their_servers_elsewhere(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--workers-per-host"):
        replace(JOB, **changes)
