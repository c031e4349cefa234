"""Workers that live and report, but get nowhere: the others do their slices, and nothing counts twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from paramserver.core.versions.names import AsyncName
from paramserver.worker.context import Context
from paramserver.worker.job.member import Member
from paramserver.worker.pace import Item, SyncPace
from tests.support.cluster.harness import Cluster, item_of, recorded, train, until, wait
from tests.support.cluster.programs import LedgerProgram, Program, adamw, cosine, dataset, network

SAMPLES, BATCH, SLICES, EPOCHS = 96, 4, 6, 12
CELLS = 60
STALL_S = 1.0

Each = Callable[[Context, int], object]


def program(each: Each | None = None) -> Program:
    return Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: network(norm=True), adamw, cosine, each=each)


def stalled(cluster: Cluster) -> list[str]:
    return [name for name, state in states(cluster).items() if state == "stuck"]


def states(cluster: Cluster) -> dict[str, str]:
    return {process.name: process.state for process in cluster.status().processes if process.role == "worker"}


class Stuck:
    """Worker 1 stops before it hands in its third slice, as a data loader that hangs would make it."""

    def __init__(self) -> None:
        self.stopped, self.released = threading.Event(), threading.Event()
        self.name: object = None

    def __call__(self, ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 2:
            item = item_of(ctx)
            self.name = item.name
            self.stopped.set()
            wait(self.released, "the release of worker 1", 60.0)


def test_sync_a_stalled_worker_is_dealt_no_slices_until_it_gets_on_again() -> None:
    stuck, hurry = Stuck(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        stuck(ctx, slices)
        hurry.wait(0.04)

    with Cluster(3, 2, slices_per_step=SLICES, stall_s=STALL_S) as cluster:
        workers = [cluster.start(program(each)) for _ in range(3)]
        wait(stuck.stopped, "worker 1 in its third slice")
        until("worker 1 alone is stalled", lambda: stalled(cluster) == ["worker-1"])
        first, second = workers[0].context, workers[2].context
        assert first is not None
        assert second is not None
        until(
            "the others share its slices",
            lambda: [first.engine.member.place(), second.engine.member.place()] == [(0, 2), (1, 2)],
        )
        assert first.world_size == 3, "it is still a member"
        stuck.released.set()
        until("worker 1 gets on", lambda: "worker-1" not in stalled(cluster))
        back = workers[1].context
        assert back is not None
        until(
            "it computes its share again",
            lambda: back.engine.member.place() == (1, 3) and back.engine.progress.slices > 8,
        )
        hurry.set()
        cluster.join()
        assert not cluster.status().losses
        outcome = cluster.outcome()
    assert outcome.digests == train(program(), slices_per_step=SLICES).digests
    assert outcome.summary["samples"] == SAMPLES * EPOCHS


def ledger(each: Each) -> LedgerProgram:
    return LedgerProgram(CELLS, 1, 2, each)


def test_async_the_slices_of_a_stalled_worker_go_to_others_and_its_clock_holds_nobody_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """G05: the others finish everything; what it brings in the end is a duplicate."""
    stuck = Stuck()
    with recorded() as log, Cluster(3, 2, "async", 1, stall_s=STALL_S) as cluster:
        workers = [cluster.start(ledger(stuck)) for _ in range(3)]
        wait(stuck.stopped, "worker 1 in its third slice")
        cluster.join([workers[0], workers[2]])
        # Who is the only one left is not called stalled any more.
        assert "a worker lives but gets nowhere" in capsys.readouterr().err
        assert not cluster.status().losses
        applied = min(server.applied for server in cluster.stats())
        stuck.released.set()
        cluster.join()
        outcome = cluster.outcome()
    assert applied == 2 * CELLS
    assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), 2.0))
    assert outcome.summary["contributions_duplicate"] >= 1
    assert outcome.summary["max_clock_spread"] <= 1
    late = {one.contribution.worker for one in log if one.contribution.name == stuck.name}
    assert late
    assert workers[1].context is not None
    assert workers[1].context.engine.member.session.member not in late


def test_async_what_a_stalled_worker_brings_first_counts_and_the_other_is_a_duplicate() -> None:
    """G05, the other order: its slice was handed out again, but it is there before the other one."""
    stuck, taken, late = Stuck(), threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if late.is_set() or ctx.rank != 1:
            item = item_of(ctx)
            if ctx.rank != 1 and item.name == stuck.name and not late.is_set():
                taken.set()
                wait(late, "the late contribution of worker 1", 60.0)
        stuck(ctx, slices)

    with recorded() as log, Cluster(2, 2, "async", "unbounded", stall_s=STALL_S) as cluster:
        workers = [cluster.start(ledger(each)) for _ in range(2)]
        wait(taken, "another one computes the slice of worker 1", 30.0)
        back = workers[1].context
        assert back is not None
        stuck.released.set()
        until("worker 1 hands its slice in", lambda: any(one.contribution.name == stuck.name for one in log))
        until("on both servers", lambda: sum(one.contribution.name == stuck.name for one in log) == 2)
        late.set()
        cluster.join()
        outcome = cluster.outcome()
    assert isinstance(stuck.name, AsyncName)
    assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), 2.0))
    assert {one.contribution.worker for one in log if one.contribution.name == stuck.name} == {
        back.engine.member.session.member
    }
    assert outcome.summary["contributions_duplicate"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_a_worker_that_stalls_again_and_again_does_no_harm(mode: str) -> None:
    """B14: each time others take its slices over; it is never given up."""
    seen: list[int] = []

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices in (1, 3, 5) and not any(s == slices for s in seen):
            seen.append(slices)
            until("it is stalled", lambda: states(cluster)["worker-1"] == "stuck" or done.is_set())
        elif ctx.rank == 0 and len(seen) < 3:
            done.wait(0.05)

    done = threading.Event()
    script = program(each) if mode == "sync" else LedgerProgram(CELLS, 2, EPOCHS, each)
    with Cluster(2, 1, mode, "unbounded", slices_per_step=SLICES if mode == "sync" else 0, stall_s=0.5) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        cluster.join([workers[0]])
        done.set()
        cluster.join()
        assert not cluster.status().losses
        outcome = cluster.outcome()
    assert seen == [1, 3, 5]
    if mode == "sync":
        assert outcome.summary["samples"] == SAMPLES * EPOCHS
        assert outcome.digests == train(program(), slices_per_step=SLICES).digests
    else:
        assert torch.equal(outcome.tensor("cells"), torch.full((CELLS,), float(EPOCHS)))


def test_who_is_found_stalled_while_it_takes_a_slice_computes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The membership that the slice was taken in counts for what is loaded, too."""
    ahead, asked = SyncPace.ahead, 0

    def found_stalled(self: SyncPace, epoch: int) -> Iterator[Item]:
        nonlocal asked
        items = ahead(self, epoch)
        while True:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(Member, "place", lambda self: (-1, 1))
                asked += 1
                item = next(items, None)
            if item is None:
                return
            yield item

    monkeypatch.setattr(SyncPace, "ahead", found_stalled)
    outcome = train(LedgerProgram(CELLS, 4, 2), slices_per_step=3)
    assert asked > 0
    assert torch.allclose(outcome.tensor("cells"), torch.full((CELLS,), 2.0 / 3))
