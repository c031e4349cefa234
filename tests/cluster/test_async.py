"""Asynchronous training: every sample once per epoch, bounded staleness, and a result that its record explains."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from paramserver.core.versions.names import AsyncName
from paramserver.core.work.slices import DataSpec, slice_indices
from paramserver.worker.context import Context
from paramserver.worker.pace import AsyncPace
from tests.support.cluster.harness import Applied, Cluster, recorded, train, until, wait
from tests.support.cluster.programs import Aligned, LedgerProgram, Optimizer, Program, adamw, cosine, dataset, sgd
from tests.support.marks import long_but

STALENESS = [0, 3, "unbounded"]
SAMPLES, BATCH, EPOCHS = 103, 4, 3
SLICES = 26 * EPOCHS


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), pytest.param(3, 2, marks=pytest.mark.long), (5, 3)])
def test_every_sample_counts_once_per_epoch(workers: int, servers: int, staleness: int | str) -> None:
    """D13: acknowledged = applied = version, on every server; the ledger shows each sample by itself."""
    with Cluster(workers, servers, "async", staleness) as cluster:
        outcome = cluster.train(LedgerProgram(SAMPLES, BATCH, EPOCHS), {"training__chunk_bytes": 64})
        assert torch.equal(outcome.tensor("cells"), torch.full((SAMPLES,), float(EPOCHS)))
        for server in cluster.stats():
            assert (server.applied, server.version, server.duplicate) == (SLICES, SLICES, 0)
        contexts = [worker.context for worker in cluster.workers]
        assert sum(ctx.engine.progress.slices for ctx in contexts if ctx is not None) == SLICES
        assert sum(ctx.engine.progress.samples for ctx in contexts if ctx is not None) == SAMPLES * EPOCHS
    if staleness != "unbounded":
        assert outcome.summary["max_clock_spread"] <= staleness
    assert outcome.summary["staleness"] == staleness


def apply_again(data: DataSpec, log: list[Applied], optimizer: Optimizer) -> torch.nn.Module:
    """One process with plain torch repeats the recorded order: each gradient on the version it was computed on."""
    model, scratch = Aligned(), Aligned()
    plain = optimizer(model.parameters(), fused=True)
    versions = [[p.detach().clone() for p in model.parameters()]]
    points = dataset(data.samples)
    for applied in log:
        name = applied.contribution.name
        assert isinstance(name, AsyncName)
        x, y = points[slice_indices(data, 0, name.epoch, name.index)]
        with torch.no_grad():
            for mine, old in zip(scratch.parameters(), versions[applied.contribution.base_version], strict=True):
                mine.copy_(old)
        scratch.zero_grad()
        F.cross_entropy(scratch(x), y).backward()  # type: ignore[no-untyped-call]
        for parameter, mine in zip(model.parameters(), scratch.parameters(), strict=True):
            assert mine.grad is not None
            # As it travels: times the samples of the slice, divided by them again.
            parameter.grad = (mine.grad * len(x)) / len(x)
        plain.step()
        versions.append([p.detach().clone() for p in model.parameters()])
    return model


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_the_recorded_order_gives_the_same_bytes_again(optimizer: Optimizer, staleness: int | str) -> None:
    """D14."""
    with recorded() as log:
        script = Program(dataset(SAMPLES), BATCH, 2, Aligned, optimizer)
        outcome = train(script, 3, 1, mode="async", staleness=staleness)
    names = [applied.contribution.name for applied in log]
    assert len(names) == len(set(names)) == 52
    again = apply_again(DataSpec(SAMPLES, BATCH), log, optimizer)
    for name, parameter in again.named_parameters():
        assert torch.equal(outcome.tensor(name), parameter.detach()), name


def test_staleness_of_what_is_applied_is_bounded() -> None:
    """With clocks at most s apart, at most (workers - 1) * (2 s + 1) contributions come in between."""
    with recorded() as log:
        train(Program(dataset(SAMPLES), BATCH, 2), 3, 1, mode="async", staleness=1)
    behind = [number - applied.contribution.base_version for number, applied in enumerate(log)]
    assert min(behind) >= 0
    assert 0 < max(behind) <= 2 * 3


def clock_of(ctx: Context) -> int:
    """The clock of a worker, which begins at the slowest one when it comes."""
    pace = ctx.engine.paces.pace
    assert isinstance(pace, AsyncPace)
    return pace.clock


class Brake:
    """Holds worker 0 before it hands in its slice number ``at``, until it is released."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.clock = 0
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == self.at:
            self.clock = clock_of(ctx)
            self.reached.set()
            wait(self.released, "the release of worker 0", 60.0)


@pytest.mark.parametrize("staleness", long_but([2], [0, 2, 5]))
def test_a_slow_worker_holds_the_others_at_exactly_the_bound(staleness: int) -> None:
    brake = Brake(at=4)
    script = LedgerProgram(400, 4, 1, brake)
    with Cluster(3, 2, "async", staleness) as cluster:
        workers = [cluster.start(script) for _ in range(3)]
        wait(brake.reached, "worker 0 in its fifth slice")

        def clocks() -> list[list[int]]:
            return [sorted(clock.clock for clock in server.clocks) for server in cluster.stats()]

        # A worker that is s ahead may still begin a slice, and whoever has finished that one waits.
        waiting = brake.clock + staleness + 1
        at_the_bound = [[brake.clock, waiting, waiting]] * 2
        until("the others are at the bound", lambda: clocks() == at_the_bound)
        versions = {server.version for server in cluster.stats()}
        for _ in range(3):  # they stay there
            assert clocks() == at_the_bound
            assert {server.version for server in cluster.stats()} == versions
        assert all("worker-0" in server.waiting_for for server in cluster.stats())
        brake.released.set()
        cluster.join(workers)
        outcome = cluster.outcome()
    assert torch.equal(outcome.tensor("cells"), torch.ones(400))
    assert outcome.summary["max_clock_spread"] == staleness


def test_unbounded_a_slow_worker_holds_nobody() -> None:
    """D05: the others do everything but the slices that the slow one has leased."""
    brake = Brake(at=1)
    script = LedgerProgram(400, 4, 1, brake)
    with Cluster(3, 2, "async", "unbounded") as cluster:
        workers = [cluster.start(script) for _ in range(3)]
        wait(brake.reached, "worker 0 in its second slice")
        # It holds at most its share of a lease; all other slices get done while it stands still.
        until("the others have done the rest", lambda: min(s.version for s in cluster.stats()) >= 100 - 2 * 16 - 1)
        assert not brake.released.is_set()
        assert workers[0].alive
        brake.released.set()
        cluster.join(workers)
        outcome = cluster.outcome()
    assert torch.equal(outcome.tensor("cells"), torch.ones(400))


def test_staleness_0_is_a_barrier() -> None:
    """D04: nobody begins the slice at clock c + 1 before everybody's slice at clock c is in."""
    order: list[int] = []

    def each(ctx: Context, slices: int) -> None:
        order.append(clock_of(ctx))  # after its slice was begun, and before it is in

    train(LedgerProgram(60 * 4, 4, 2, each), 3, 2, mode="async", staleness=0)
    assert len(order) == 120
    assert order == sorted(order)
    assert order[-1] >= 39


def test_learning_rate_schedules_count_the_steps_of_the_job() -> None:
    """Asynchronous: a step is a slice, whoever did it; the last one is applied near the end of the schedule."""
    with recorded() as log:
        train(Program(dataset(SAMPLES), BATCH, 2, schedule=cosine), 3, 1, mode="async", staleness=2)
    rates = [float(applied.contribution.groups[0]["lr"]) for applied in log]  # type: ignore[arg-type]
    assert rates[0] == 0.1
    assert rates[-1] < 0.012  # at most 10 steps behind the last one
    assert all(late <= early + 0.02 for early, late in zip(rates, rates[6:], strict=False))
