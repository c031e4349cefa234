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
    SequentialLR,
)
from torch.utils.data import DataLoader

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
        rig.kill_now("server-1")
        until("the job went back", lambda: rig.rollbacks)
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
