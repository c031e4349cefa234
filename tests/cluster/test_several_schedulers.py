"""Several schedulers of one optimizer: each step has the learning rate of plain torch, whoever comes or goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, MultiStepLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.versions.advances import MOST
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, train, until, wait
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig

# 12 slices in an epoch, two of them in a step.
SAMPLES, BATCH, SLICES, EPOCHS = 48, 4, 2, 5
PER_EPOCH = 6
STEPS = EPOCHS * PER_EPOCH
VALUES = [1.0, 2.0, 3.0, 0.5, 0.75]

Build = Callable[[Optimizer], Any]
# By name: what is built, in this order, and which of it the script advances after each step and after each epoch.
KINDS: dict[str, tuple[list[Build], list[int], list[int]]] = {
    "two per step": (
        [lambda o: CosineAnnealingLR(o, STEPS // 2), lambda o: LinearLR(o, 0.1, total_iters=4)],
        [1, 0],
        [],
    ),
    "one per step, one per epoch": (
        [lambda o: ExponentialLR(o, 0.5), lambda o: CosineAnnealingLR(o, STEPS // 2)],
        [1],
        [0],
    ),
    "two per epoch": (
        [lambda o: MultiStepLR(o, [2, 3], 0.1), lambda o: CosineAnnealingLR(o, EPOCHS)],
        [],
        [1, 0],
    ),
    "one per step, one measured": (
        [lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), lambda o: CosineAnnealingLR(o, STEPS // 2)],
        [1],
        [0],
    ),
}


def advance(schedulers: list[Any], numbers: list[int], epoch: int) -> None:
    for number in numbers:
        one = schedulers[number]
        one.step(*((VALUES[epoch],) if isinstance(getattr(one, "wrapped", one), ReduceLROnPlateau) else ()))


def by_hand(kind: str) -> list[float]:
    """The learning rate of each step in plain torch."""
    builds, per_step, per_epoch = KINDS[kind]
    optimizer = sgd(network().parameters())
    schedulers, found = [build(optimizer) for build in builds], []
    for epoch in range(EPOCHS):
        for _ in range(PER_EPOCH):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            advance(schedulers, per_step, epoch)
        advance(schedulers, per_epoch, epoch)
    return found


class Script:
    """Notes the learning rate of each slice, by version. ``plain``: a loop that is not over ``ctx.epochs``."""

    def __init__(self, kind: str, plain: bool = False, each: Callable[[Context], object] | None = None) -> None:
        self.kind, self.plain, self.each = kind, plain, each
        self.found: dict[int, list[float]] = {}
        self.ranks: dict[int, set[int]] = {}

    def __call__(self, ctx: Context) -> None:
        builds, per_step, per_epoch = KINDS[self.kind]
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        schedulers: list[Any] = [build(optimizer) for build in builds]
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader, *schedulers = ctx.prepare(model, optimizer, loader, *schedulers)
        for epoch in range(EPOCHS) if self.plain else ctx.epochs(EPOCHS):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                self.found.setdefault(ctx.version, []).append(optimizer.param_groups[0]["lr"])
                self.ranks.setdefault(ctx.version, set()).add(ctx.rank)
                if self.each is not None:
                    self.each(ctx)
                optimizer.step()
                advance(schedulers, per_step, epoch)
                optimizer.zero_grad()
            advance(schedulers, per_epoch, epoch)

    def check(self, first: int = 0) -> None:
        """Each slice of each step had exactly the rate of plain torch."""
        wanted = by_hand(self.kind)
        assert sorted(self.found) == list(range(first, STEPS))
        for version, found in sorted(self.found.items()):
            assert set(found) == {wanted[version]}, f"step {version}"


LOOPS = [pytest.param(False, id="ctx.epochs"), pytest.param(True, id="range")]


@pytest.mark.parametrize("plain", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_the_rate_of_plain_torch(kind: str, plain: bool) -> None:
    script = Script(kind, plain)
    train(script, 2, 1, slices_per_step=SLICES)
    script.check()


@pytest.mark.parametrize("plain", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_comes_late(kind: str, plain: bool) -> None:
    """It comes in the third epoch, and has the right rate in its first step."""
    come = threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.rank == 0 and ctx.version == 2 * PER_EPOCH + 3:
            come.set()
            until("the other worker has come", lambda: ctx.world_size == 2)

    script = Script(kind, plain, stop)
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        cluster.start(script)
        wait(come, "the third epoch")
        cluster.start(script)
        cluster.join()
    script.check()
    assert any(1 in ranks for ranks in script.ranks.values()), "the late worker has computed slices"


@pytest.mark.parametrize("plain", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_right_after_going_back(kind: str, plain: bool, tmp_path: Path) -> None:
    """The job goes back from the fourth epoch to the second one."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 3 * PER_EPOCH + 1 and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    script = Script(kind, plain, stop)
    with Rig(tmp_path, PER_EPOCH + 4, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        wait(reached, "the fourth epoch", 60.0)
        rig.until_saved(PER_EPOCH + 4)
        rig.goes_back()
        go.set()
        rig.finish()
    script.check()
    assert any(len(found) > SLICES for found in script.found.values()), "some steps were done again"


@pytest.mark.parametrize("plain", [pytest.param(False, id="ctx.epochs", marks=pytest.mark.long), LOOPS[1]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_is_resumed(kind: str, plain: bool, tmp_path: Path) -> None:
    """All processes end in the fourth epoch, and the job goes on from a checkpoint in the second one."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 3 * PER_EPOCH + 1:
            reached.set()
            wait(go, "the end", 60.0)

    with Rig(tmp_path, PER_EPOCH + 4, training__slices_per_step=SLICES) as rig:
        rig.begin(Script(kind, plain, stop))
        wait(reached, "the fourth epoch", 60.0)
        rig.until_saved(PER_EPOCH + 4)
        for server in list(rig.keepers):
            rig.call(server.die)
        rig.ending = True
        go.set()
    script = Script(kind, plain)
    again: dict[str, Any] = {"checkpoint__resume": str(tmp_path / "ckpt"), "training__slices_per_step": SLICES}
    with Rig(tmp_path, PER_EPOCH + 4, **again) as rig:
        rig.begin(script)
        rig.finish()
    script.check(PER_EPOCH + 4)


# ---- refused


class Irregular:
    """Advances its schedulers by ``chosen``, which gets the number of the step and says which ones."""

    def __init__(self, builds: list[Build], chosen: Callable[[int], list[int]], loader: bool = True) -> None:
        self.builds, self.chosen, self.loader = builds, chosen, loader
        self.rates: list[float] = []

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        schedulers: list[Any] = [ctx.prepare(build(optimizer)) for build in self.builds]
        x, y = dataset(SAMPLES).tensors
        batches: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        if self.loader:
            model, optimizer, batches = ctx.prepare(model, optimizer, batches)
        else:
            model, optimizer = ctx.prepare(model, optimizer)
        for number, (x, y) in enumerate(batches):
            self.rates.append(optimizer.param_groups[0]["lr"])
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for one in self.chosen(number):
                schedulers[one].step()
            optimizer.zero_grad()


TWO: list[Build] = [lambda o: LinearLR(o, 0.1, total_iters=3), lambda o: CosineAnnealingLR(o, 8)]
IRREGULAR = (
    r"^the script calls step\(\) of {} after some optimizer steps in the loop and not after others, .*SequentialLR$"
)


@pytest.mark.parametrize("loader", [True, False], ids=["loader", "none"])
@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        (lambda number: [0] if number < 3 else [1], "CosineAnnealingLR"),
        (lambda number: [1] if number < 3 else [], "CosineAnnealingLR"),
        (lambda number: [0, 1] if number % 2 else [], "LinearLR"),
    ],
    ids=["one after the other", "stops", "every second"],
)
def test_a_scheduler_that_is_not_advanced_in_each_step_is_refused(
    chosen: Callable[[int], list[int]], name: str, loader: bool
) -> None:
    with pytest.raises(errors.UserError, match=IRREGULAR.format(name)):
        train(Irregular(TWO, chosen, loader), 1, 1)


def test_a_schedule_that_is_at_its_end_need_not_be_advanced() -> None:
    script = Irregular(TWO[:1], lambda number: [0] if number < 3 else [])
    train(script, 1, 1)
    assert script.rates[3:] == [script.rates[3]] * (SAMPLES // BATCH - 3)
    assert script.rates[0] == pytest.approx(0.1 * script.rates[3])


def test_a_scheduler_that_comes_after_the_first_step_is_refused() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        ctx.prepare(ExponentialLR(optimizer, 0.5))

    with pytest.raises(errors.UserError, match=r"^the ExponentialLR comes after the first step: give all schedulers"):
        train(script, 1, 1)


def test_a_script_may_have_so_many_schedulers() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        for _ in range(MOST):
            ctx.prepare(ExponentialLR(optimizer, 0.5))
        with pytest.raises(errors.UserError, match=f"^ctx.prepare has {MOST} schedulers, and takes no more$"):
            ctx.prepare(ExponentialLR(optimizer, 0.5))
        raise KeyError("enough")

    with pytest.raises(KeyError):
        train(script, 1, 1)
