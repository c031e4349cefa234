"""Schedulers that a script advances with a value, at the head of a batch, or with another length of the loader."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, LambdaLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from paramserver.worker.schedulers.counted import wrong_length
from tests.support.cluster.harness import Cluster, train, until, wait
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig

# 12 slices in an epoch.
SAMPLES, BATCH, EPOCHS = 48, 4, 3

Build = Callable[[Optimizer], Any]


class Loop:
    """What a script does in its loop with a scheduler, written once for plain torch and for a cluster."""

    def __init__(self, build: Build, head: Any = None, tail: Any = None, per_epoch: Build | None = None) -> None:
        """``head``, ``tail``: called with the scheduler, the epoch, the batch and ``len(loader)``."""
        self.build, self.head, self.tail, self.per_epoch = build, head, tail, per_epoch
        self.found: dict[int, list[float]] = {}
        self.each: Callable[[Context], object] | None = None
        self.plain_loop = False

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        schedulers = [build(optimizer) for build in (self.build, self.per_epoch) if build is not None]
        model, optimizer, loader, *schedulers = ctx.prepare(model, optimizer, loader, *schedulers)
        for epoch in range(EPOCHS) if self.plain_loop else ctx.epochs(EPOCHS):
            for i, (x, y) in enumerate(loader):
                if self.head is not None:
                    self.head(schedulers[0], epoch, i, len(loader))
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                self.found.setdefault(ctx.version, []).append(optimizer.param_groups[0]["lr"])
                if self.each is not None:
                    self.each(ctx)
                optimizer.step()
                if self.tail is not None:
                    self.tail(schedulers[0], epoch, i, len(loader))
                optimizer.zero_grad()
            for one in schedulers[1:]:
                one.step()

    def by_hand(self, per_epoch: int) -> list[float]:
        """The rate of each step in plain torch, in one process with so many steps in an epoch."""
        optimizer = sgd(network().parameters())
        schedulers = [build(optimizer) for build in (self.build, self.per_epoch) if build is not None]
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for epoch in range(EPOCHS):
                for i in range(per_epoch):
                    if self.head is not None:
                        self.head(schedulers[0], epoch, i, per_epoch)
                    found.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    if self.tail is not None:
                        self.tail(schedulers[0], epoch, i, per_epoch)
                for one in schedulers[1:]:
                    one.step()
        return found

    def check(self, slices: int, first: int = 0) -> None:
        """Each slice of each step has had the rate of plain torch."""
        wanted = self.by_hand(12 // slices)
        assert sorted(self.found) == list(range(first, len(wanted)))
        assert self.found == {at: [wanted[at]] * len(found) for at, found in self.found.items()}


def restarts(optimizer: Optimizer) -> Any:
    return CosineAnnealingWarmRestarts(optimizer, 2)


def exponential(optimizer: Optimizer) -> Any:
    return ExponentialLR(optimizer, 0.9)


def lowered(optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, lambda n: 1 / (1 + n))


def plain(scheduler: Any, epoch: int, i: int, n: int) -> None:
    scheduler.step()


def documented(scheduler: Any, epoch: int, i: int, n: int) -> None:
    scheduler.step(epoch + i / n)


def shifted(scheduler: Any, epoch: int, i: int, n: int) -> None:
    scheduler.step(epoch + (i + 1) / n)


def counting(scheduler: Any, epoch: int, i: int, n: int) -> None:
    scheduler.step(epoch * n + i)


LOOPS: dict[str, Callable[[], Loop]] = {
    "epoch + i / n": lambda: Loop(restarts, tail=documented),
    "epoch + i / n at the head": lambda: Loop(restarts, head=documented),
    "epoch + (i + 1) / n": lambda: Loop(restarts, tail=shifted),
    "epoch * n + i": lambda: Loop(lowered, tail=counting),
    "at the head": lambda: Loop(exponential, head=plain),
    "at the head, and another one per epoch": lambda: Loop(exponential, head=plain, per_epoch=exponential),
}
SHAPES = [(1, 2), *(pytest.param(*shape, marks=pytest.mark.long) for shape in ((1, 1), (2, 2), (2, 4), (3, 1)))]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(("workers", "slices"), SHAPES)
@pytest.mark.parametrize("name", LOOPS)
def test_each_step_has_the_rate_of_plain_torch(name: str, workers: int, slices: int) -> None:
    loop = LOOPS[name]()
    train(loop, workers, 1, slices_per_step=slices)
    loop.check(slices)


CHOSEN = ["epoch + i / n", "at the head, and another one per epoch"]


@pytest.mark.parametrize("plain_loop", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CHOSEN)
def test_a_worker_that_comes_late(name: str, plain_loop: bool) -> None:
    loop, come = LOOPS[name](), threading.Event()
    loop.plain_loop = plain_loop

    def stop(ctx: Context) -> None:
        if ctx.rank == 0 and ctx.version == 9:
            come.set()
            until("the other worker has come", lambda: ctx.world_size == 2)

    loop.each = stop
    with Cluster(1, 1, slices_per_step=2) as cluster:
        cluster.start(loop)
        wait(come, "step 9")
        cluster.start(loop)
        cluster.join()
    loop.check(2)


@pytest.mark.parametrize("plain_loop", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", CHOSEN)
def test_right_after_going_back(name: str, plain_loop: bool, tmp_path: Path) -> None:
    loop, reached, go = LOOPS[name](), threading.Event(), threading.Event()
    loop.plain_loop = plain_loop

    def stop(ctx: Context) -> None:
        if ctx.version == 9 and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    loop.each = stop
    with Rig(tmp_path, 4, training__slices_per_step=2) as rig:
        rig.begin(loop)
        wait(reached, "step 9", 60.0)
        rig.goes_back()
        go.set()
        rig.finish()
    loop.check(2)
    assert any(len(found) > 2 for found in loop.found.values()), "some steps were done again"


def twice(scheduler: Any, epoch: int, i: int, n: int) -> None:
    scheduler.step()
    scheduler.step()


def of_the_hour(scheduler: Any, epoch: int, i: int, n: int) -> None:
    scheduler.step(epoch + i / 100)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (Loop(restarts, tail=of_the_hour), r"^the script calls CosineAnnealingWarmRestarts.step\(0.01\) in its loop"),
        (
            Loop(lowered, tail=lambda scheduler, epoch, i, n: scheduler.step(epoch)),
            r"^the script calls LambdaLR.step\(0\) ",
        ),
        (Loop(exponential, tail=twice), r"^the script calls step\(\) of ExponentialLR twice on a batch"),
    ],
    ids=["another value", "the epoch", "twice"],
)
def test_what_workers_would_not_agree_on_is_refused(loop: Loop, sentence: str) -> None:
    with pytest.raises(errors.UserError, match=sentence):
        train(loop, 1, 1, slices_per_step=2)


def test_a_call_between_the_batches_of_a_slice_is_refused() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        scheduler: Any = exponential(optimizer)
        model, optimizer, loader, scheduler = ctx.prepare(model, optimizer, loader, scheduler, accumulate=2)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            if ctx.step_due:
                optimizer.step()
            scheduler.step()

    with pytest.raises(errors.UserError, match=r"^the script calls step\(\) of ExponentialLR on a batch before"):
        train(script, 1, 1)


@pytest.mark.parametrize("build", [exponential, lowered])
def test_at_the_head_of_a_step_without_a_loader(build: Build) -> None:
    found, steps = [], 6

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, scheduler = ctx.prepare(model, optimizer, build(optimizer))
        x, y = dataset(SAMPLES).tensors
        for _ in range(steps):
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    train(script, 1, 1)
    optimizer, wanted = sgd(network().parameters()), []
    scheduler = build(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        wanted.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("length", "early", "epochs", "says"),
    [
        (36, True, 0, "T_max = 36, which is 3 times len(loader) before ctx.prepare (12)"),
        (36, False, 3, "T_max = 36, which is 3 times len(loader) before ctx.prepare (12)"),
        (36, False, 6, ""),
        (36, True, 6, ""),  # six times the length after ctx.prepare
        (18, True, 3, ""),
        (35, True, 3, ""),
    ],
)
def test_a_schedule_of_another_length_is_named(length: int, early: bool, epochs: int, says: str) -> None:
    said = wrong_length(CosineAnnealingLR(sgd(network().parameters()), length), 12, 6, early, epochs)
    assert said.startswith(f"CosineAnnealingLR has {says}") if says else not said


@pytest.mark.parametrize("plain_loop", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_script_that_takes_the_length_before_prepare_is_told(
    early: bool, plain_loop: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        length = len(loader)
        scheduler: Any = CosineAnnealingLR(optimizer, 2 * length)
        if early:
            scheduler = ctx.prepare(scheduler)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        if not early:
            scheduler = ctx.prepare(CosineAnnealingLR(optimizer, 2 * length))
        for _ in range(2) if plain_loop else ctx.epochs(2):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        ctx.close()

    train(script, 1, 1, slices_per_step=2)
    says = "CosineAnnealingLR has T_max = 24, which is 2 times len(loader) before ctx.prepare (12). After ctx.prepare"
    assert capsys.readouterr().err.count(says) == 1
