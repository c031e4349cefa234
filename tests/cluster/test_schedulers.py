"""Schedulers of torch, built before or after `ctx.prepare`: each step has the learning rate of plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Outcome, train, until, wait
from tests.support.cluster.programs import adamw, dataset, network, sgd
from tests.support.failover.rollback import Rig

# 24 slices in an epoch, two of them in a step.
SAMPLES, BATCH, SLICES, EPOCHS = 96, 4, 2, 2
STEPS = 24

Build = Callable[[Optimizer], Any]


def warm_up(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, STEPS - 4)]
    return SequentialLR(optimizer, parts, [4])


def three(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), ConstantLR(optimizer, 1.0, 1), ExponentialLR(optimizer, 0.9)]
    return SequentialLR(optimizer, parts, [4, 9])


def chained(optimizer: Optimizer) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=5), ExponentialLR(optimizer, 0.9)])


BUILDS: dict[str, Build] = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 5),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.001, 0.1, step_size_up=5),
    "warm-up and cosine": warm_up,
    "warm-up, constant, exponential": three,
    "chained": chained,
}


def by_hand(build: Build, make: Any = sgd) -> list[dict[str, Any]]:
    """The hyper-parameters of each step in plain torch."""
    optimizer = make(network().parameters())
    schedule, found = build(optimizer), []
    for _ in range(STEPS):
        found.append(hypers(optimizer))
        optimizer.step()
        schedule.step()
    return found


def hypers(optimizer: Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {"lr": group["lr"], "momentum": group["betas"][0] if "betas" in group else group["momentum"]}


class Script:
    """Notes the hyper-parameters of each step. ``first``: the scheduler is built before `prepare`."""

    def __init__(self, build: Build, first: bool, make: Any = sgd, each: Callable[[Context], object] | None = None):
        self.build, self.first, self.make, self.each = build, first, make, each
        self.found: dict[int, list[dict[str, Any]]] = {}

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = self.make(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        if self.first:
            schedule = self.build(optimizer)
            model, optimizer, loader, schedule = ctx.prepare(model, optimizer, loader, schedule)
        else:
            model, optimizer, loader = ctx.prepare(model, optimizer, loader)
            schedule = ctx.prepare(self.build(optimizer))
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                self.found.setdefault(ctx.version, []).append(hypers(optimizer))
                if self.each is not None:
                    self.each(ctx)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    def check(self) -> None:
        """Each slice of each step had what plain torch has."""
        wanted = by_hand(self.build, self.make)
        assert sorted(self.found) == list(range(STEPS))
        for version, found in self.found.items():
            for one in found:
                assert one == pytest.approx(wanted[version]), f"step {version}"


SHORT = {("one cycle", True), ("warm-up and cosine", False), ("chained", True)}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        pytest.param(name, first, marks=[] if (name, first) in SHORT else pytest.mark.long)
        for name in BUILDS
        for first in (True, False)
    ],
)
def test_each_step_has_the_rate_of_plain_torch(name: str, first: bool) -> None:
    script = Script(BUILDS[name], first, adamw if name == "one cycle" else sgd)
    train(script, 2, 1, slices_per_step=SLICES)
    script.check()


@pytest.mark.parametrize(
    "name",
    [
        "warm-up and cosine",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("chained", "one cycle", "restarts", "cyclic")),
    ],
)
def test_right_after_going_back(name: str, tmp_path: Path) -> None:
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version >= 11 and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    script = Script(BUILDS[name], True, each=stop)
    with Rig(tmp_path, 3, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        wait(reached, "step 11", 60.0)
        rig.goes_back()
        go.set()
        rig.finish()
    script.check()
    assert any(len(found) > SLICES for found in script.found.values()), "some steps were done again"


@pytest.mark.parametrize("name", ["warm-up and cosine", pytest.param("chained", marks=pytest.mark.long)])
def test_a_worker_that_comes_late(name: str) -> None:
    come = threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.rank == 0 and ctx.version == 9:
            come.set()
            until("the other worker has come", lambda: ctx.world_size == 2)

    script = Script(BUILDS[name], False, each=stop)
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        cluster.start(script)
        wait(come, "step 9")
        cluster.start(script)
        cluster.join()
        outcome: Outcome = cluster.outcome()
    script.check()
    assert outcome.summary["steps"] == STEPS
    assert torch.isfinite(outcome.tensor("0.weight")).all()


@pytest.mark.parametrize("first", [True, False], ids=["before prepare", "after it"])
def test_torch_does_not_warn_in_a_worker_that_comes_late(first: bool) -> None:
    """It passes the first epoch without a step of its own. A warning is an error in tests."""
    come = threading.Event()

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        schedule = ExponentialLR(optimizer, 0.5) if first else None
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        schedule = ctx.prepare(schedule or ExponentialLR(optimizer, 0.5))
        for epoch in range(EPOCHS):
            for x, y in loader:
                if ctx.rank == 0 and ctx.version == SAMPLES // BATCH // SLICES + 1:
                    come.set()
                    until("the other worker has come", lambda: ctx.world_size == 2)
                rates.add((epoch, optimizer.param_groups[0]["lr"]))
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()

    rates: set[tuple[int, float]] = set()
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        cluster.start(script)
        wait(come, "the second epoch", 60.0)
        cluster.start(script)
        cluster.join()
    assert len(rates) == EPOCHS, rates


# ---- ReduceLROnPlateau


# After the first value the rate falls with each that is not lower: 0.1, 0.05, 0.025, 0.025, ...
VALUES = [1.0, 2.0, 3.0, 0.5, 0.25, 0.75]
RATES = [0.1, 0.1, 0.05, 0.025, 0.025, 0.025]


class Measured:
    """Gives the scheduler a value after each epoch; the values of rank 0 count if it is the first to come."""

    def __init__(self, plain: bool = False, each: Callable[[Context], object] | None = None, epochs: int = 6) -> None:
        self.plain, self.each, self.epochs = plain, each, epochs
        self.rates: dict[tuple[int, int], set[float]] = {}
        # By epoch and timeline: an epoch that comes again has a value of its own.
        self.first: dict[tuple[int, int], threading.Event] = {}

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        schedule: Any = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        loader: Any = DataLoader(dataset(16), batch_size=BATCH)
        model, optimizer, loader, schedule = ctx.prepare(model, optimizer, loader, schedule)
        for epoch in range(self.epochs) if self.plain else ctx.epochs(self.epochs):
            for x, y in loader:
                self.rates.setdefault((epoch, ctx.rank), set()).add(optimizer.param_groups[0]["lr"])
                if self.each is not None:
                    self.each(ctx)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            undone = ctx.went_back and not self.plain
            first = self.first.setdefault((epoch, ctx.engine.shards.timeline), threading.Event())
            if ctx.rank == 0:
                schedule.step(VALUES[epoch])
                if not undone:
                    first.set()
            else:
                if not undone:
                    wait(first, "worker 0")
                schedule.step(torch.tensor(100.0 + epoch))

    def check(self, epochs: int = 6) -> None:
        """In each epoch all workers had the same rate, which follows from the values of worker 0."""
        for (epoch, rank), rates in self.rates.items():
            assert rates == {RATES[epoch]}, f"epoch {epoch}, worker {rank}"
        assert {epoch for epoch, _ in self.rates} == set(range(epochs))


@pytest.mark.parametrize("plain", [False, True], ids=["ctx.epochs", "range"])
def test_all_workers_lower_the_rate_at_the_same_value(plain: bool) -> None:
    script = Measured(plain)
    train(script, 2, 1, slices_per_step=SLICES)
    script.check()


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ctx.epochs", "range"])
def test_a_measured_rate_right_after_going_back(plain: bool, tmp_path: Path) -> None:
    """Two steps in an epoch; the job goes back from the fifth epoch to the third."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 9 and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    script = Measured(plain, stop)
    with Rig(tmp_path, 5, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        wait(reached, "step 9", 60.0)
        rig.goes_back()
        go.set()
        rig.finish()
    if not plain:  # there an epoch that is done again belongs to the pass at hand
        script.check()
    last = {rates for (epoch, _), found in script.rates.items() if epoch == 5 for rates in found}
    assert last == {RATES[5]}


@pytest.mark.long
def test_a_job_that_is_resumed_has_the_measured_rate(tmp_path: Path) -> None:
    """All processes end in the fifth epoch, and the job goes on from a checkpoint in the third."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 9:
            reached.set()
            wait(go, "the end", 60.0)

    with Rig(tmp_path, 5, training__slices_per_step=SLICES) as rig:
        rig.begin(Measured(each=stop))
        wait(reached, "step 9", 60.0)
        rig.until_saved(5)
        for server in list(rig.keepers):
            rig.call(server.die)
        rig.ending = True
        go.set()
    script = Measured()
    again: dict[str, Any] = {
        "checkpoint__resume": str(tmp_path / "ckpt"),
        "training__slices_per_step": SLICES,
        "workers": 1,
    }
    with Rig(tmp_path, 5, **again) as rig:
        rig.begin(script)
        rig.finish()
    assert script.rates == {(epoch, 0): {RATES[epoch]} for epoch in (2, 3, 4, 5)}


def test_a_worker_that_comes_late_has_the_measured_rate() -> None:
    come = threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.rank == 0 and ctx.version == 7:
            come.set()
            until("the other worker has come", lambda: ctx.world_size == 2)

    script = Measured(each=stop)
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        cluster.start(script)
        wait(come, "step 7")
        cluster.start(script)
        cluster.join()
    script.check()
    assert {epoch for epoch, rank in script.rates if rank == 1} <= {3, 4, 5}
    assert (5, 1) in script.rates


def test_a_measured_value_in_the_loop_is_refused() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        schedule: Any = ReduceLROnPlateau(optimizer)
        loader: Any = DataLoader(dataset(16), batch_size=BATCH)
        model, optimizer, loader, schedule = ctx.prepare(model, optimizer, loader, schedule)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with pytest.raises(errors.UserError, match="belongs between two epochs"):
                schedule.step(1.0)
            optimizer.zero_grad()

    train(script, 1, 1)
