"""Training over a bad network, and with workers that die, come back and join: the bytes are those of a quiet run."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from google.protobuf.message import Message

from paramserver.transport.base import Channel, Frames
from paramserver.worker.context import Context
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Cluster, Died, train, until, wait
from tests.support.cluster.programs import LedgerProgram, Program, dataset
from tests.support.cluster.small_job import (
    SLICES,
    Death,
    calm,
    calm_over,
    program,
)

# Samples of the ledger, in slices of 2.
CELLS = 60


BAD_LINES: dict[str, list[Rule]] = {
    "replies lost": [Rule("Shard.Push", Fault.LOSE_REPLY, 0.2), Rule("Shard.Pull", Fault.LOSE_REPLY, 0.2)],
    "requests dropped": [Rule("Shard.P*", Fault.DROP_REQUEST, 0.2)],
    "sent twice": [Rule("Shard.P*", Fault.DUPLICATE, 0.3)],
    "overtaken": [Rule("Shard.P*", Fault.DELAY, 0.5)],
    "cut short": [Rule("Shard.Push", Fault.CUT_UPLOAD, 0.3)],
    "the first of everything": [
        *(Rule(f"Shard.{name}", Fault.LOSE_REPLY, times=2) for name in ("Initialize", "Push", "Pull")),
        Rule("Coordinator.Join", Fault.DROP_REQUEST, times=2),
        Rule("Coordinator.Session", Fault.LOSE_REPLY, times=3),
    ],
    "all of it (A13)": [
        Rule("Shard.P*", Fault.DROP_REQUEST, 0.1),
        Rule("Shard.P*", Fault.LOSE_REPLY, 0.1),
        Rule("Shard.P*", Fault.DUPLICATE, 0.1),
        Rule("Shard.P*", Fault.DELAY, 1.0, delay_s=0.005),
    ],
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_sync_over_a_bad_network_gives_the_same_bytes(name: str) -> None:
    outcome = calm_over(BAD_LINES[name], 1)
    if name in ("replies lost", "sent twice", "all of it (A13)"):
        assert outcome.summary["contributions_duplicate"] > 0


@pytest.mark.parametrize("name", BAD_LINES)
def test_async_over_a_bad_network_counts_everything_once(name: str) -> None:
    plan = FaultPlan([*BAD_LINES[name], Rule("Coordinator.Lease", Fault.LOSE_REPLY, times=2)], seed=2)
    outcome = train(LedgerProgram(CELLS, 2, 2), 3, 2, mode="async", staleness=2, faults=plan)
    plan.check()
    assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), 2.0))
    assert outcome.summary["contributions_applied"] == CELLS == outcome.summary["steps"]
    assert outcome.summary["max_clock_spread"] <= 2


# ---- workers that die


@pytest.mark.parametrize("at", [0, 1, 5])
def test_sync_a_worker_dies_in_the_middle_of_a_step(at: int) -> None:
    """Its slices go to the others; not one bit changes."""
    death = Death(at)
    outcome = train(program(death), 3, 2, slices_per_step=SLICES, grace_s=0.1)
    assert death.died
    calm(outcome)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_falls_silent_until_its_lease_ends(mode: str) -> None:
    """Nothing closes the connection: only the lease tells."""
    silent = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 2:
            cluster.workers[1].cut(silent=True)
            silent.set()
            raise Died

    with Cluster(3, 2, mode, 2, slices_per_step=SLICES if mode == "sync" else 0, lease_s=1.5) as cluster:
        outcome = cluster.train(program(each) if mode == "sync" else LedgerProgram(CELLS, 2, 2, each))
        # Synchronous: the others take its slices over, so they may be through before its lease ends.
        until("the lease of worker-1 ends", lambda: "worker-1" in cluster.status().lost)
    assert silent.is_set()
    if mode == "sync":
        calm(outcome)
    else:
        assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), 2.0))


def test_async_a_worker_dies_and_its_leased_slices_go_to_others() -> None:
    death = Death(3)
    outcome = train(LedgerProgram(CELLS, 2, 2, death), 3, 2, mode="async", staleness=2, grace_s=0.1)
    assert death.died
    assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), 2.0))
    assert outcome.summary["max_clock_spread"] <= 2


class Telling:
    """A channel that sets an event when an upload has been answered."""

    def __init__(self, inner: Channel, answered: threading.Event) -> None:
        self._inner, self._answered = inner, answered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """As the channel does."""
        reply = await self._inner.upload(method, frames, timeout=timeout)
        self._answered.set()
        return reply


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_reaches_one_server_only_is_counted_there_once(mode: str) -> None:
    """A09, B10: it dies between the shards; another computes the slice, and one shard answers DUPLICATE."""
    plan = FaultPlan()
    half, dead = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank != 1 or half.is_set():
            return
        if slices == 2:  # from here on nothing reaches server 1; the push below gets to server 0
            channels = ctx.engine.shards.links.channels
            channels[0] = cast(Channel, Telling(channels[0], half))
            channels[1] = plan.wrap(cluster.job.network.connect)("server-1")
            cluster.call_in_loop(lambda: plan.cut(silent=True))
            threading.Thread(target=die, daemon=True).start()

    def die() -> None:
        wait(half, "the first half")
        cluster.workers[1].cut(silent=True)
        dead.set()

    ledger = mode == "async"
    with Cluster(2, 2, mode, "unbounded", slices_per_step=0 if ledger else SLICES, lease_s=1.5) as cluster:
        script = LedgerProgram(CELLS, 2, 1, each) if ledger else program(each)
        workers = [cluster.start(script, {"training__chunk_bytes": 64}) for _ in range(2)]
        wait(half, "half of a contribution")
        wait(dead, "the death of worker 1")
        cluster.join(workers[:1])
        outcome = cluster.outcome()
        duplicates = [server.duplicate for server in cluster.stats()]
    # Asynchronous: slices that were done, but not reported yet, were handed out again, too, and are on both.
    assert duplicates[0] > duplicates[1]
    if ledger:
        assert torch.equal(outcome.tensor("cells"), torch.ones(CELLS))
    else:
        calm(outcome)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_was_given_up_comes_back(mode: str) -> None:
    """B02: cut off for longer than its lease while it computes; then it goes on, and nothing counts twice."""
    back = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 2 and not back.is_set():
            before = cluster.stats()[0].applied
            cluster.workers[1].cut()
            until("worker-1 is given up", lambda: "worker-1" in cluster.status().lost)
            until("the others went on", lambda: cluster.stats()[0].applied > before)
            cluster.workers[1].heal()
            back.set()

    script = program(each) if mode == "sync" else LedgerProgram(4 * CELLS, 2, 1, each)
    with Cluster(2, 2, mode, 2, slices_per_step=SLICES if mode == "sync" else 0, grace_s=0.1) as cluster:
        outcome = cluster.train(script)
    assert back.is_set()
    if mode == "sync":
        calm(outcome)
    else:
        assert torch.equal(outcome.tensor("cells"), torch.ones(4 * CELLS))


# ---- workers that come


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_that_join_in_the_middle(mode: str) -> None:
    running, helped = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 3:
            running.set()
            wait(helped, "a slice of a newcomer")
        elif ctx.rank > 0:
            helped.set()

    script = program(each) if mode == "sync" else LedgerProgram(CELLS, 2, 2, each)
    with Cluster(1, 2, mode, 2, slices_per_step=SLICES) as cluster:
        cluster.start(script)
        wait(running, "worker 0 in its fourth slice")
        for _ in range(2):
            cluster.start(script)
        cluster.join()
        outcome = cluster.outcome()
        counted = [worker.context.engine.progress.slices for worker in cluster.workers if worker.context is not None]
    assert min(counted) > 0
    if mode == "sync":
        calm(outcome)
    else:
        assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), 2.0))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_three_samples_and_eight_workers(mode: str) -> None:
    """Most workers never get a slice; all of them come to an end."""
    script = Program(dataset(3), 1, 3)
    outcome = train(script, 8, 2, mode=mode, slices_per_step=2 if mode == "sync" else 0)
    assert outcome.summary["contributions_applied"] == 9
    if mode == "sync":
        assert outcome.digests == train(script, 1, 1, slices_per_step=2).digests
        assert outcome.summary["steps"] == 6


def test_more_workers_than_slices_of_a_step() -> None:
    outcome = train(program(), 7, 2, slices_per_step=SLICES)
    calm(outcome)


# ---- the plan itself


def test_a_fault_that_never_fires_fails() -> None:
    plan = FaultPlan([Rule("Shard.Push", Fault.LOSE_REPLY, times=1), Rule("Shard.Nothing", Fault.DELAY)], seed=5)
    train(Program(dataset(8), 8, 1), faults=plan)
    with pytest.raises(AssertionError, match=r"never fired \(seed 5\): DELAY: Shard.Nothing$"):
        plan.check()


def test_rules_count_and_repeat() -> None:
    rules = [
        Rule("Shard.Push", Fault.DELAY, times=2, skip=1),
        Rule("Shard.*", Fault.DUPLICATE, share=0.5),
    ]
    plans = [FaultPlan(rules, seed=seed) for seed in (1, 1, 2)]
    hits = [[rule.fault if (rule := plan.next("Shard.Push")) else None for _ in range(200)] for plan in plans]
    assert hits[0] == hits[1] != hits[2]
    assert [hit for hit in hits[0][:4] if hit is Fault.DELAY] == [Fault.DELAY] * 2
    assert hits[0].count(Fault.DELAY) == 2
    assert 70 < hits[0].count(Fault.DUPLICATE) < 130
    assert plans[0].fired[0] == 2
    assert plans[0].next("Coordinator.Join") is None
