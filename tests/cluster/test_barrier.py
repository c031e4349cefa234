"""``ctx.once`` and ``ctx.barrier``: one worker prepares the data, and the others wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Worker, train, until, wait
from tests.support.cluster.programs import dataset, network, sgd


def trains(ctx: Context) -> None:
    model: Any = network()
    optimizer: Any = sgd(model.parameters())
    loader: Any = DataLoader(dataset(48), batch_size=4)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(errors.UserError, match="after training has begun"):
            ctx.barrier()


def test_the_others_wait_for_the_data_that_the_main_worker_prepares(tmp_path: Path) -> None:
    """The main worker comes last. Barriers after epochs are refused: a worker may leave an epoch out."""
    data, others = tmp_path / "data", threading.Semaphore(0)

    def script(ctx: Context) -> None:
        if ctx.is_main:
            for _ in range(2):
                others.acquire(timeout=60)
            data.write_text("there")
        else:
            others.release()
        ctx.barrier()
        assert data.read_text() == "there"
        trains(ctx)

    train(script, 3, 1)


def test_the_main_worker_dies_while_it_prepares_the_data(tmp_path: Path) -> None:
    """Another worker does the work, and a worker that is started again finds it done."""
    data, died = tmp_path / "data", threading.Event()

    def work() -> None:
        if not died.is_set():
            died.set()
            raise Died
        data.write_text("there")

    def script(ctx: Context) -> None:
        ctx.once(work)
        assert data.read_text() == "there"
        trains(ctx)

    with Cluster(2, 1) as cluster:
        cluster.start(script)
        wait(died, "the end of the main worker")
        second = cluster.start(script)
        until("it has heard of the death", lambda: second.context is not None and second.context.world_size == 1)
        again = Worker(cluster, 0, script, {})  # with the rank of the dead worker, as `paramserver run` does it
        cluster.workers.append(again)
        cluster.join([second, again])


def test_who_is_missing_is_named() -> None:
    found: list[str] = []

    def script(ctx: Context) -> None:
        if ctx.rank == 1:
            try:
                ctx.barrier(timeout_s=0.5)
            except errors.DeadlineError as error:
                found.append(str(error))
        trains(ctx)

    def other(ctx: Context) -> None:
        if ctx.rank == 0:
            until("the other worker has waited", lambda: bool(found))
        script(ctx)

    train(other, 2, 1)
    (text,) = found
    assert text.startswith("ctx.barrier has waited 0.5 s for worker-0: all workers have to call it at the same place")


def test_a_worker_that_comes_late_waits_for_nobody_who_was_there() -> None:
    go, come = threading.Event(), threading.Event()

    def script(ctx: Context) -> None:
        ctx.barrier()
        come.set()
        wait(go, "the late worker")
        trains(ctx)

    def late(ctx: Context) -> None:
        ctx.barrier()
        go.set()
        trains(ctx)

    with Cluster(1, 1) as cluster:
        cluster.start(script)
        wait(come, "the first worker")
        cluster.start(late)
        cluster.join()


def test_in_the_loop_it_is_refused() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(dataset(48), batch_size=4))
        for _ in loader:
            ctx.barrier()

    with pytest.raises(errors.UserError, match=r"^ctx\.barrier belongs outside of the loop over the prepared loader"):
        train(script, 1, 1)


def test_a_loop_over_the_loader_before_prepare_is_named() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        plain = DataLoader(dataset(48), batch_size=4)
        model, optimizer, _ = ctx.prepare(model, optimizer, plain)
        for x, y in plain:
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    with pytest.raises(
        errors.UserError,
        match=r"^optimizer\.step\(\) comes before any iteration over the prepared loader\. .*has returned",
    ):
        train(script, 1, 1)
