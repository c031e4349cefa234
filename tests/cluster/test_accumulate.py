"""Gradients of several batches before each optimizer step: what plain torch and DDP do, with any number of workers."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices
from paramserver.worker.context import Context
from paramserver.worker.gradients import early
from tests.support.cluster.early import counted
from tests.support.cluster.harness import Cluster, Died, Outcome, inside, train, until, wait
from tests.support.cluster.programs import FEATURES, adamw, dataset, network, sgd
from tests.support.failover.rollback import Rig, same
from tests.support.schedules.ddp import ACCUMULATE, BATCH, EPOCHS, UNEVEN
from tests.support.unit.pages import ROOT

Each = Callable[[Context, int], object]


class Accumulating:
    """A training script as users write it, which steps every so many batches."""

    def __init__(
        self, samples: int, accumulate: int, each: Each | None = None, clip: str = "", norm: bool = True, **loader: Any
    ) -> None:
        """``each`` is called after every backward pass, with the number of this worker's batches so far."""
        self.samples, self.accumulate, self.each, self.clip, self.norm = samples, accumulate, each, clip, norm
        self.loader: Any = {"batch_size": BATCH, "shuffle": True, **loader}

    def __call__(self, ctx: Context) -> None:
        k = self.accumulate
        model: Any = network(norm=self.norm)
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(dataset(self.samples), **self.loader)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=k)
        schedule: Any = ctx.prepare(OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * -(-len(loader) // k)))
        batches = 0
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                due = ctx.step_due
                with nullcontext() if due else ctx.no_sync():
                    loss: Any = F.cross_entropy(model(x), y) / k
                    loss.backward()
                batches += 1
                if self.each is not None:
                    self.each(ctx, batches)
                if not due:
                    continue
                if self.clip == "all":
                    ctx.clip_grad_norm(0.05)
                elif self.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def like_ddp(samples: int, accumulate: int, slices: int, clip: str = "") -> nn.Module:
    """What DDP does with ``slices`` processes: each adds up its batches' gradients, then their mean is the gradient."""
    spec = DataSpec(samples, BATCH * accumulate, batches=accumulate, slices_per_step=slices)
    schedule, data = SyncSchedule(spec.slices_per_epoch, slices), dataset(samples)
    model = network()
    optimizer = adamw(model.parameters())
    steps = EPOCHS * schedule.steps_per_epoch
    rates = OneCycleLR(optimizer, 0.05, total_steps=steps)
    for version in range(steps):
        step = schedule.step(version)
        optimizer.zero_grad()
        for index in step.slices:
            for part in torch.split(torch.tensor(slice_indices(spec, 0, step.epoch, index)), BATCH):
                x, y = data[part]
                (F.cross_entropy(model(x), y) / accumulate / slices).backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        rates.step()
    return model


def close(outcome: Outcome, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "slices", "clip"),
    [
        (UNEVEN, 2, ""),
        (UNEVEN, 2, "all"),
        (UNEVEN - 7, 1, ""),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((48, 2, ""), (UNEVEN, 1, "all"))),
    ],
)
def test_as_ddp_with_the_same_batches(samples: int, slices: int, clip: str) -> None:
    outcome = train(Accumulating(samples, 4, clip=clip, norm=False), 2, 2, slices_per_step=slices)
    close(outcome, like_ddp(samples, 4, slices, clip))
    assert outcome.summary["samples"] == samples * EPOCHS


def test_what_the_script_clips_is_the_gradient_of_all_batches_of_its_slice() -> None:
    outcome = train(Accumulating(UNEVEN, 4, clip="mine", norm=False), 1, 2, slices_per_step=1)
    close(outcome, like_ddp(UNEVEN, 4, 1, "mine"))


@pytest.mark.long
def test_as_torchs_ddp_with_two_processes(tmp_path: Path) -> None:
    """With gloo, `no_sync`, and steps that count batches themselves."""
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.support.schedules.ddp", str(rank), str(tmp_path)], cwd=ROOT)
        for rank in range(2)
    ]
    try:
        assert [process.wait(120.0) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    model = network()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    close(train(Accumulating(UNEVEN, ACCUMULATE, norm=False), 2, 2, slices_per_step=2), model)


# 20 batches, the last one of 2 samples; 4 slices of 2 batches make a step: two steps, and one of 4 slices of 1 batch.
MANY: dict[str, Any] = {"samples": 59, "accumulate": 2}
SLICES = 4


@cache
def twin() -> tuple[str, str, str]:
    """The same training in one worker."""
    return train(Accumulating(**MANY), 1, 1, slices_per_step=SLICES).digests


@pytest.mark.parametrize(
    ("workers", "servers"),
    [(4, 2), *(pytest.param(*one, marks=pytest.mark.long) for one in ((2, 1), (1, 3), (5, 4)))],
)
def test_the_bits_depend_neither_on_the_workers_nor_on_the_servers(workers: int, servers: int) -> None:
    assert train(Accumulating(**MANY), workers, servers, slices_per_step=SLICES).digests == twin()


def test_a_worker_dies_in_the_middle_of_a_slice() -> None:
    """Its batches count for nothing; another worker computes all of them."""

    died: list[bool] = []

    def dies(ctx: Context, batches: int) -> None:
        if ctx.rank == 1 and batches == 3:
            died.append(ctx.step_due)
            raise Died

    outcome = train(Accumulating(**MANY, each=dies), 2, 2, slices_per_step=SLICES)
    assert died == [False]
    assert outcome.digests == twin()
    assert outcome.summary["samples"] == 59 * EPOCHS


def test_slices_of_a_slow_worker_go_to_others_with_all_their_batches() -> None:
    taken: Counter[int] = Counter()

    def slow(ctx: Context, batches: int) -> None:
        assert ctx.prepared.steps is not None
        assert ctx.prepared.steps.item is not None
        taken[ctx.rank] += ctx.prepared.steps.item.unplanned
        if ctx.rank == 1:
            until("the other worker takes a slice over", lambda: taken[0] > 0)

    outcome = train(Accumulating(**MANY, each=slow), 2, 2, slices_per_step=SLICES)
    assert taken[0] > 0, f"slices that were taken over: {taken}"
    assert outcome.digests == twin()


def test_a_server_dies_in_the_middle_of_a_slice(tmp_path: Path) -> None:
    """The script gets the other batches of its slice, and the job goes on from the checkpoint."""
    reached, go, counts = threading.Event(), threading.Event(), []

    def stop(ctx: Context, batches: int) -> None:
        counts.append(batches)
        if ctx.version == 4 and not ctx.step_due and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    script = Accumulating(**MANY, each=stop)
    with Rig(tmp_path, 2, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        wait(reached, "the middle of a slice", 60.0)
        rig.kill_now("server-1")
        go.set()
        summary = rig.finish()
        assert rig.rollbacks == 1
    wanted = train(Accumulating(**MANY), 1, 1, slices_per_step=SLICES).summary
    same(summary, wanted)


def test_a_loader_with_processes_gives_the_same_batches() -> None:
    script = Accumulating(**MANY, num_workers=2)
    assert train(script, 1, 1, slices_per_step=SLICES).digests == twin()


def test_asynchronous_slices_are_groups_too() -> None:
    outcome = train(Accumulating(59, 2), 2, 2, mode="async", slices_per_step=2)
    assert outcome.summary["samples"] == 59 * EPOCHS
    assert outcome.summary["contributions_applied"] == EPOCHS * 10


# ---- gradients that leave during the last backward pass


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """See `counted`."""
    return counted(monkeypatch)


def test_gradients_leave_in_the_last_backward_pass_of_a_slice(count: Counter[str]) -> None:
    options: dict[str, Any] = {"workers": 2, "servers": 2, "settings": {"training.chunk_bytes": 832}}
    outcome = train(Accumulating(UNEVEN, 4), slices_per_step=2, **options)
    # Two workers, six steps; before the first one nobody knows what a contribution consists of.
    assert count == {"begun": 2 * 5, "sealed": 2 * 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early, "LEAST_BYTES", 1 << 40)
        assert outcome.digests == train(Accumulating(UNEVEN, 4), slices_per_step=2, **options).digests


@pytest.mark.parametrize("told", [True, False])
def test_two_backward_passes_of_a_batch_leave_early_if_the_first_is_in_no_sync(told: bool, count: Counter[str]) -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        loader: Any = DataLoader(dataset(48), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, sgd(model.parameters()), loader)
        for x, y in loader:
            with ctx.no_sync() if told else nullcontext():
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(script, 1, 2)
    assert (count["sealed"] == 15) if told else (count["sealed"] == 0)


# ---- GradScaler, and loops without a loader


def test_a_grad_scaler_changes_no_bit() -> None:
    """The scale is a power of two."""

    def script(ctx: Context, scaler: Any) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(UNEVEN), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=4)
        for x, y in loader:
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
            if ctx.step_due:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    def scaled(enabled: bool) -> Outcome:
        def run(ctx: Context) -> None:
            script(ctx, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled))

        return train(run, 2, 2, slices_per_step=2)

    assert scaled(True).digests == scaled(False).digests


def test_without_a_loader_a_step_takes_the_gradients_of_all_backward_passes_before_it() -> None:
    """As nanoGPT has it."""
    x, y = dataset(16)[:]

    def go(model: Any, optimizer: Any, ready: Callable[[], object]) -> None:
        for _ in range(5):
            for micro in range(4):
                model.require_backward_grad_sync = micro == 3
                loss: Any = F.cross_entropy(model(x[micro::4]), y[micro::4]) / 4
                loss.backward()
            ready()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def script(ctx: Context) -> None:
        model: Any = network()
        model, optimizer = ctx.prepare(model, sgd(model.parameters()))
        go(model, optimizer, lambda: ctx.step_due or pytest.fail("a step is always due"))

    model = network()
    go(model, sgd(model.parameters()), lambda: None)
    close(train(script, 2, 2), model)


# ---- what is refused


def looping(ctx: Context, samples: int, step: Callable[[Any, int], bool], **prepare: Any) -> None:
    model: Any = network()
    loader: Any = DataLoader(dataset(samples), batch_size=BATCH)
    model, optimizer, loader = ctx.prepare(model, sgd(model.parameters()), loader, **prepare)
    for number, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        if step(ctx, number):
            optimizer.step()
            optimizer.zero_grad()


REFUSED: list[tuple[int, Callable[[Any, int], bool], dict[str, Any], str]] = [
    (48, lambda ctx, number: number % 2 == 1, {}, r"ctx.prepare\(model, optimizer, loader, accumulate=k\)"),
    (48, lambda ctx, number: number % 2 == 1, {"accumulate": 4}, "after batch 2 of the 4 batches of a slice"),
    (48, lambda ctx, number: number % 8 == 7, {"accumulate": 4}, "has all 4 batches of a slice"),
    (54, lambda ctx, number: number % 4 == 3, {"accumulate": 4}, "an epoch has 18 batches"),
    (51, lambda ctx, number: ctx.step_due and number % 4 == 3, {"accumulate": 4}, "for another batch without|all 1"),
    (48, lambda ctx, number: True, {"accumulate": 0}, "at least 1, not 0"),
    (48, lambda ctx, number: True, {"accumulate": True}, "at least 1, not True"),
]


@pytest.mark.parametrize(("samples", "step", "prepare", "sentence"), REFUSED, ids=[str(case[3]) for case in REFUSED])
def test_what_would_lose_gradients_is_refused(
    samples: int, step: Callable[[Any, int], bool], prepare: dict[str, Any], sentence: str
) -> None:
    def work(ctx: Context) -> None:
        with pytest.raises(errors.UserError, match=sentence):
            looping(ctx, samples, step, **prepare)

    inside(work)


def test_steps_that_count_themselves_are_right_where_all_slices_have_as_many_batches() -> None:
    def counted(ctx: Context) -> None:
        looping(ctx, 48, lambda _, number: (number + 1) % 4 == 0, accumulate=4)

    def asked(ctx: Context) -> None:
        looping(ctx, 48, lambda ctx, _: ctx.step_due, accumulate=4)

    digests = train(counted, 1, 2, slices_per_step=2).digests
    assert digests == train(asked, 2, 1, slices_per_step=2).digests


def test_accumulate_belongs_to_the_loader_and_no_sync_to_the_model() -> None:
    def work(ctx: Context) -> None:
        model: Any = network()
        with pytest.raises(errors.UserError, match="gets the DataLoader"):
            ctx.prepare(model, sgd(model.parameters()), accumulate=2)
        with pytest.raises(errors.UserError, match="belongs after"):
            ctx.no_sync()
        assert not ctx.step_due

    inside(work)


def test_workers_that_accumulate_different_numbers_are_refused() -> None:
    def script(ctx: Context) -> None:
        Accumulating(48, 2 + 2 * ctx.rank)(ctx)

    with Cluster(2, 1) as cluster, pytest.raises(errors.DataError, match="drop_last, shuffle or accumulate"):
        cluster.train(script)


def test_seeds_differ_from_batch_to_batch() -> None:
    seeds: list[tuple[int, Tensor]] = []

    def note(ctx: Context, batches: int) -> None:
        seeds.append((ctx.slice_seed(), torch.rand(1)))

    train(Accumulating(48, 4, note), 1, 1)
    assert len({seed for seed, _ in seeds}) == len({float(drawn) for _, drawn in seeds}) == 16 * EPOCHS


class Drawing(nn.Linear):
    """Draws from a generator of its own, ``more`` numbers more often than it needs."""

    def __init__(self, more: int) -> None:
        super().__init__(FEATURES, 3)
        self.own, self.more = random.Random(1), more
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(self.own.random())
        for _ in range(self.more):
            self.own.random()
        return super().forward(x)


def test_what_a_batch_draws_does_not_depend_on_the_batches_before_it_in_its_slice() -> None:
    def drawn(more: int) -> list[float]:
        inner = Drawing(more)

        def script(ctx: Context) -> None:
            loader = DataLoader(dataset(48), batch_size=BATCH)
            model, optimizer, loader = ctx.prepare(inner, sgd(inner.parameters()), loader, accumulate=4)
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if ctx.step_due:
                    optimizer.step()
                    optimizer.zero_grad()

        train(script, 1, 1)
        return inner.drawn

    assert drawn(0) == drawn(5)
