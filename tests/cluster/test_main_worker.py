"""``ctx.is_main``: one worker does what a script does once, also after training, and also if workers come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Worker, until, wait
from tests.support.cluster.programs import Program, dataset

# With long leases, so that a worker is lost only where a test has it die.
MODES = pytest.mark.parametrize("mode", ["sync", "async"])
# 6 slices in an epoch.
SAMPLES, BATCH = 48, 8


def epochs(ctx: Context) -> None:
    """Train, with ``ctx.epochs``."""
    Program(dataset(SAMPLES), BATCH)(ctx)


def mains(*workers: Worker) -> list[int]:
    """The ranks of the workers that are the main one."""
    return [worker.context.rank for worker in workers if worker.context is not None and worker.context.is_main]


@MODES
@pytest.mark.parametrize("workers", [2, 3])
def test_the_code_after_training_is_done_once_by_workers_that_come_to_it_one_after_another(
    mode: str, workers: int
) -> None:
    """Before, the next worker became the main one when the main one left, and saved once more."""
    left, saved = [threading.Event() for _ in range(workers)], []

    def script(ctx: Context) -> None:
        epochs(ctx)
        if ctx.rank:
            wait(left[ctx.rank - 1], "the worker before has left")
            until("it has heard so", lambda: ctx.world_size == workers - ctx.rank)
        if ctx.is_main:
            saved.append(ctx.rank)
        ctx.close()
        left[ctx.rank].set()

    with Cluster(workers, 1, mode, lease_s=60.0) as cluster:
        cluster.train(script)
    assert saved == [0]


def test_the_code_after_a_plain_loop_without_a_loader_is_done_once() -> None:
    left, saved = threading.Event(), []

    def script(ctx: Context) -> None:
        model = torch.nn.Linear(1, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if ctx.rank:
            wait(left, "the main worker has left")
            until("it has heard so", lambda: ctx.world_size == 1)
        if ctx.is_main:
            saved.append(ctx.rank)
        ctx.engine.close(ended=True)  # as at the exit of a script
        left.set()

    with Cluster(2, 1, lease_s=60.0) as cluster:
        cluster.train(script)
    assert saved == [0]


@MODES
def test_another_worker_saves_if_the_main_one_dies_before_it_has(mode: str) -> None:
    through = threading.Barrier(2)
    saved: list[int] = []

    def dies(ctx: Context) -> None:
        epochs(ctx)
        through.wait(20.0)
        assert ctx.is_main
        raise Died

    def saves(ctx: Context) -> None:
        epochs(ctx)
        through.wait(20.0)
        until("it has heard of the death", lambda: ctx.world_size == 1)
        if ctx.is_main:
            saved.append(ctx.rank)

    with Cluster(2, 1, mode, lease_s=60.0) as cluster:
        workers = [cluster.start(dies), cluster.start(saves)]
        cluster.join(workers)
    assert saved == [1]


@MODES
def test_a_worker_that_is_started_again_saves_if_the_others_have_passed_that_place(mode: str) -> None:
    """Worker 1 was told that worker 0 saves, and ends. Worker 0 dies, and its successor saves."""
    told, died = threading.Event(), threading.Event()
    saved: list[int] = []

    def dies(ctx: Context) -> None:
        epochs(ctx)
        wait(told, "the other one was told no")
        raise Died

    def passes(ctx: Context) -> None:
        epochs(ctx)
        assert not ctx.is_main
        told.set()
        wait(died, "the main worker has died")
        until("it has heard so, and is the main one", lambda: ctx.engine.member.session.view.main == 2)

    def successor(ctx: Context) -> None:
        epochs(ctx)
        cluster.join([second])
        until("it has heard that the other one has left", lambda: ctx.world_size == 1)
        if ctx.is_main:
            saved.append(ctx.rank)

    with Cluster(2, 1, mode, lease_s=60.0) as cluster:
        first, second = cluster.start(dies), cluster.start(passes)
        cluster.join([first])
        third = cluster.start(successor)
        until("it has joined", lambda: third.context is not None)
        died.set()
        cluster.join()
    assert saved == [2]


def test_a_worker_that_comes_late_with_a_lower_rank_is_not_the_main_one() -> None:
    """Nobody who was told that it saves after this epoch is told otherwise later in the same epoch."""
    hold, come = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == 2 and ctx.rank == 1:
            hold.set()
            wait(come, "the newcomer is there")

    def dies(ctx: Context) -> None:
        wait(hold, "the other one computes")
        raise Died

    def script(ctx: Context) -> None:
        Program(dataset(SAMPLES), BATCH, each=each)(ctx)

    with Cluster(2, 1, lease_s=60.0) as cluster:
        first = cluster.start(lambda ctx: Program(dataset(SAMPLES), BATCH, each=lambda ctx, _: dies(ctx))(ctx))
        second = cluster.start(script)
        cluster.join([first])
        until("another one is the main one", lambda: mains(second) == [1])
        newcomer = Worker(cluster, 0, script, {})
        until("it has joined", lambda: newcomer.context is not None and newcomer.context.world_size == 2)
        assert newcomer.context is not None
        assert newcomer.context.rank == 0
        assert not newcomer.context.is_main
        assert mains(second) == [1]
        come.set()
        cluster.join([second])
        newcomer.join(time.monotonic() + 20.0)


class Filled:
    """Begins with weights that say which worker they are of. ``first``: what a worker does before ``ctx.prepare``."""

    def __init__(self, first: Callable[[Context], object]) -> None:
        self.first = first
        self.begun: dict[int, float] = {}

    def __call__(self, ctx: Context) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, float(ctx.rank))
        self.first(ctx)
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.begun[ctx.rank] = model.weight.item()


@MODES
@pytest.mark.parametrize("late", [0, 1])
def test_the_job_begins_with_the_weights_of_the_main_worker_whoever_comes_first(mode: str, late: int) -> None:
    """So it is enough that rank 0 loads a checkpoint, as with DDP."""

    def first(ctx: Context) -> None:
        if ctx.rank == late:
            until("the other one has registered its model", lambda: cluster.job.coordinator.job.registry.registered)

    script = Filled(first)
    with Cluster(2, 1, mode, lease_s=60.0) as cluster:
        cluster.train(script)
    assert script.begun == {0: 0.0, 1: 0.0}


def test_if_the_main_worker_dies_before_it_has_brought_weights_those_of_the_next_one_count() -> None:
    def first(ctx: Context) -> None:
        if ctx.rank == 0 and not died.is_set():
            until("the other one has registered its model", lambda: cluster.job.coordinator.job.registry.registered)
            died.set()
            raise Died

    script, died = Filled(first), threading.Event()
    with Cluster(2, 1, lease_s=60.0) as cluster:
        workers = [cluster.start(script), cluster.start(script)]
        cluster.join(workers[:1])
        until(
            "the death is noticed", lambda: not workers[1].alive or len(cluster.job.coordinator.job.main.places()) == 1
        )
        successor = Worker(cluster, 0, script, {})
        cluster.join(workers[1:])
        successor.join(time.monotonic() + 20.0)
    assert script.begun == {0: 1.0, 1: 1.0}


def test_if_the_main_worker_leaves_before_it_has_brought_weights_another_one_is_the_main_worker() -> None:
    def leaves(ctx: Context) -> None:
        until("both are there", lambda: ctx.world_size == 2)
        ctx.engine.close(ended=True)  # as at the exit of a script

    script = Filled(lambda ctx: until("the first one has left", lambda: ctx.is_main))
    with Cluster(2, 1, lease_s=60.0) as cluster:
        workers = [cluster.start(leaves), cluster.start(script)]
        until("it is the main worker", lambda: mains(workers[1]) == [1])
        cluster.start(Filled(lambda ctx: None))
        cluster.join()
    assert script.begun == {1: 1.0}


def test_who_waits_for_the_main_worker_says_so() -> None:
    """Worker 0 has joined and does not come to ``ctx.prepare``."""
    come = threading.Event()

    def first(ctx: Context) -> None:
        if ctx.rank == 0:
            wait(come, "the status")

    wanted = "the weights of worker-0, the main worker, which has not come to ctx.prepare of its model"
    with Cluster(2, 1, lease_s=60.0) as cluster:
        workers = [cluster.start(Filled(first)), cluster.start(Filled(first))]
        until("it is said", lambda: cluster.status().view.reason == wanted)
        come.set()
        cluster.join(workers)
