"""Slow workers in synchronous training: others take over what they have not begun, and the bytes stay the same."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paramserver.core.versions.names import SyncName
from paramserver.core.work.slices import assign
from paramserver.worker.context import Context
from paramserver.worker.weights.weights import Weights
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Applied, Cluster, Outcome, recorded, train, until, wait
from tests.support.cluster.programs import LedgerProgram, Numbers, Program, adamw, cosine, dataset, network

# 96 samples in slices of 2: three steps of 16 slices an epoch, two epochs.
SAMPLES, BATCH, SLICES, EPOCHS, STEPS = 96, 2, 16, 2, 6
WORKERS = 4
# The slowest worker is the last one, to which these slices of each step are dealt.
SLOWEST = WORKERS - 1
ITS_RANGE = range(*assign(SLICES, WORKERS)[SLOWEST])
SLICE_S = 0.02

Each = Callable[[Context, int], object]


def program(each: Each | None = None) -> Program:
    return Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: network(norm=True), adamw, cosine, each=each)


@cache
def twin() -> tuple[str, str, str]:
    """The same training in one worker."""
    return train(program(), slices_per_step=SLICES).digests


def calm(outcome: Outcome) -> None:
    """It came out as if all had been equally fast."""
    assert outcome.digests == twin()
    assert outcome.summary["contributions_applied"] == SLICES * STEPS
    assert outcome.summary["samples"] == SAMPLES * EPOCHS


def paces(*seconds: float) -> Each:
    """What the compute of each worker takes, by rank."""
    return lambda ctx, slices: time.sleep(seconds[ctx.rank])


def computed(cluster: Cluster) -> dict[int, int]:
    """How many slices each worker has computed, by rank."""
    contexts = [worker.context for worker in cluster.workers]
    return {ctx.rank: ctx.engine.progress.slices for ctx in contexts if ctx is not None}


def by_rank(log: list[Applied], cluster: Cluster) -> Counter[int]:
    """Whose contributions for slices of the slowest worker's range counted on the first shard."""
    ranks = {ctx.engine.member.session.member: ctx.rank for w in cluster.workers if (ctx := w.context) is not None}
    counts: Counter[int] = Counter()
    for applied in log:
        name = applied.contribution.name
        if applied.shard == 0 and isinstance(name, SyncName):
            counts[ranks[applied.contribution.worker]] += len(set(ITS_RANGE) & set(range(name.lo, name.hi)))
    return counts


def test_idle_workers_take_slices_that_a_slow_one_has_not_begun() -> None:
    """B12: nobody is evicted, few slices are computed twice."""
    each = paces(*[SLICE_S] * SLOWEST, 4 * SLICE_S)
    with recorded() as log, Cluster(WORKERS, 2, slices_per_step=SLICES) as cluster:
        outcome = cluster.train(program(each))
        assert not cluster.status().losses
        slices, whose = computed(cluster), by_rank(log, cluster)
    calm(outcome)
    assert whose.total() == len(ITS_RANGE) * STEPS
    others = whose.total() - whose[SLOWEST]
    assert others >= 2 * STEPS, f"the others took over {others} slices of {whose}"
    assert sum(slices.values()) <= SLICES * STEPS + 3 * STEPS, f"{slices}: too many were computed twice"


def test_a_worker_that_stops_for_a_while_holds_nobody_up() -> None:
    """The others go on to the end without it; what it brings then is late, and it is a worker like the others."""
    stopped, go = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 6:
            stopped.set()
            wait(go, "the end of the others", 60.0)

    with Cluster(3, 2, slices_per_step=SLICES) as cluster:
        workers = [cluster.start(program(each)) for _ in range(3)]
        wait(stopped, "worker 1 in its seventh slice")
        cluster.join([workers[0], workers[2]])
        assert min(server.version for server in cluster.stats()) == STEPS
        go.set()
        cluster.join()
        assert not cluster.status().losses
        outcome = cluster.outcome()
        assert computed(cluster)[1] == 7, "it found the job done, and computed nothing more"
    calm(outcome)


def test_equal_workers_add_up_what_they_have_and_push_it_as_one() -> None:
    with recorded() as log, Cluster(WORKERS, 1, slices_per_step=SLICES) as cluster:
        outcome = cluster.train(program(paces(*[SLICE_S] * WORKERS)))
    calm(outcome)
    sizes = Counter(applied.contribution.name.slices for applied in log)
    assert sizes[SLICES // WORKERS] >= WORKERS, f"contributions by size: {sizes}"


def test_without_answers_to_questions_everybody_does_its_own_slices() -> None:
    plan = FaultPlan([Rule("Shard.Steal", Fault.DROP_REQUEST)])
    each = paces(*[SLICE_S / 4] * SLOWEST, SLICE_S)
    with recorded() as log, Cluster(WORKERS, 2, slices_per_step=SLICES, faults=plan) as cluster:
        outcome = cluster.train(program(each))
        whose = by_rank(log, cluster)
    plan.check()
    calm(outcome)
    assert whose[SLOWEST] == whose.total() == len(ITS_RANGE) * STEPS


def test_answers_to_questions_that_get_lost_change_no_bit() -> None:
    plan = FaultPlan([Rule("Shard.Steal", Fault.LOSE_REPLY, 0.3), Rule("Shard.Steal", Fault.DUPLICATE, 0.3)], seed=3)
    each = paces(*[SLICE_S / 4] * SLOWEST, SLICE_S)
    outcome = train(program(each), WORKERS, 2, slices_per_step=SLICES, faults=plan)
    plan.check()
    calm(outcome)


def test_slices_that_one_server_lacks_are_computed_by_others() -> None:
    """B10: a worker reaches server 0 only, and lives. What server 1 lacks others bring; server 0 has it already."""
    plan = FaultPlan()
    cut, healed = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 2:
            ctx.engine.shards.links.channels[1] = plan.wrap(cluster.job.network.connect)("server-1")
            cluster.call_in_loop(lambda: plan.cut(silent=True))
            cut.set()
        if ctx.rank == 0 and cut.is_set() and not healed.is_set():
            healed.set()
            threading.Thread(target=heal, daemon=True).start()

    def heal() -> None:
        until("two more steps", lambda: min(server.version for server in cluster.stats()) >= 2, 60.0)
        cluster.call_in_loop(plan.heal)

    with Cluster(2, 2, slices_per_step=SLICES) as cluster:
        outcome = cluster.train(program(each), {"training__chunk_bytes": 64})
        assert not cluster.status().losses
        duplicates = [server.duplicate for server in cluster.stats()]
    assert healed.is_set()
    assert duplicates[0] >= 1
    calm(outcome)


def test_every_sample_is_in_once_whoever_is_slow() -> None:
    each = paces(SLICE_S, *[SLICE_S / 8] * 2)
    outcome = train(LedgerProgram(64, 1, 2, each), 3, 2, slices_per_step=8)
    assert torch.allclose(outcome.tensor("cells"), torch.full((64,), 2.0 / 8))


class Reads(Numbers):
    """Counts what is read."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.reads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("late", [False, True])
def test_no_batch_is_loaded_in_vain_because_of_a_slice_of_others(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Each worker loads the batches of the slices that it hands in, and no others, with one exception.

    The slowest worker goes on in the last step when the others have left: it then has all slices of the step, and its
    loader goes back to the first of them. The exception: a worker may begin a slice while weights of its version are
    still on their way. If the others publish two versions meanwhile, these weights do not come any more, and the slice
    is not handed in. ``late``: this happens once.
    """
    ranks: dict[int, int] = {}
    dropped: Counter[int] = Counter()
    settle = Weights.settle_slice

    def settle_slice(self: Weights, used: frozenset[int], waited_s: float) -> bool:
        right, version = settle(self, used, waited_s), self.version
        if late and ranks[id(self)] == SLOWEST and not dropped[SLOWEST]:
            until("two versions of the others", lambda: cluster.stats()[0].version >= version + 2, 60.0)
            right = False
        dropped[ranks[id(self)]] += not right
        return right

    monkeypatch.setattr(Weights, "settle_slice", settle_slice)
    data = [Reads(SAMPLES) for _ in range(WORKERS)]
    seconds = [*[SLICE_S] * SLOWEST, 4 * SLICE_S]

    def script(ctx: Context) -> None:
        ranks[id(ctx.engine.weights)] = ctx.rank
        model: Any = torch.nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        loader: Any = DataLoader(data[ctx.rank], batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(1):
            for numbers in loader:
                model(numbers.float()[:, None]).mean().backward()
                time.sleep(seconds[ctx.rank])
                optimizer.step()
                optimizer.zero_grad()

    with Cluster(WORKERS, 1, slices_per_step=SLICES) as cluster:
        cluster.train(script)
        slices = computed(cluster)
    assert dropped.total() >= late
    read = {rank: BATCH * (count + dropped[rank]) for rank, count in slices.items()}
    assert {rank: one.reads for rank, one in enumerate(data)} == read
    assert slices[SLOWEST] < slices[0]
