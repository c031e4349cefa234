"""Scripts without a loader, which draw their batches at random: each slice is drawn from a seed of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.versions.names import SyncName
from paramserver.core.work.slices import slice_seed
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Outcome, alone, inside, recorded, train, until, wait
from tests.support.cluster.programs import dataset, network, sgd

STEPS = 6


class Script:
    """Draws batches with a generator of its own, since the workers of a test are threads of one process."""

    def __init__(self, slices: int, each: Callable[[Context, int], object] | None = None) -> None:
        """``slices``: how many each worker hands in."""
        self.slices, self.each = slices, each
        # What each worker drew, by rank.
        self.drawn: dict[int, list[tuple[int, ...]]] = {}

    def __call__(self, ctx: Context) -> None:
        x, y = dataset(500).tensors
        model: Any = network(norm=True)
        optimizer: Any = sgd(model.parameters())
        schedule: Any = LambdaLR(optimizer, lambda step: 0.9**step)
        model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
        generator = torch.Generator()
        mine = self.drawn.setdefault(ctx.rank, [])
        for number in range(self.slices):
            generator.manual_seed(ctx.slice_seed())
            rows = torch.randint(len(x), (8,), generator=generator)
            mine.append(tuple(rows.tolist()))
            loss: Any = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            if self.each is not None:
                self.each(ctx, number)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def trained(workers: int, slices_per_step: int) -> tuple[Outcome, Script]:
    script = Script(STEPS * slices_per_step // workers)
    outcome = train(script, workers, 2, {"training.chunk_bytes": 512}, slices_per_step=slices_per_step)
    assert outcome.summary["steps"] == STEPS
    return outcome, script


@pytest.mark.parametrize("slices_per_step", [2, 6])
def test_the_same_bits_with_any_number_of_workers(slices_per_step: int) -> None:
    one, script = trained(1, slices_per_step)
    assert len(set(script.drawn[0])) == STEPS * slices_per_step, "no batch came twice"
    for workers in (2,) if slices_per_step == 2 else (2, 3):
        outcome, several = trained(workers, slices_per_step)
        assert outcome.digests == one.digests
        assert sorted(chain(*several.drawn.values())) == sorted(script.drawn[0])


def test_generators_of_the_process_are_seeded_for_every_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, where nobody else draws: torch, NumPy and Python, from the first batch on."""
    found: list[tuple[int, float]] = []
    seeds: list[int] = []

    def script(ctx: Context) -> None:
        model: Any = network()
        model, optimizer = ctx.prepare(model, sgd(model.parameters()))
        torch.rand(3)  # before the batch, so that what comes is of the same stream
        for _ in range(4):
            found.append((int(torch.randint(1 << 30, ())), float(np.random.rand())))
            seeds.append(ctx.slice_seed("model"))
            loss: Any = model(torch.randn(4, 8)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    alone(script, tmp_path, monkeypatch, training__slices_per_step=2, training__seed=5)
    assert seeds == [slice_seed(5, 0, index, "model") for index in range(4)]
    for number, (seed, (integer, number_)) in enumerate(zip(seeds, found, strict=True)):
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        if number == 0:
            torch.rand(3)
        assert integer == int(torch.randint(1 << 30, ()))
        assert number_ == float(np.random.rand())


def test_in_asynchronous_mode_no_two_slices_are_drawn_alike() -> None:
    script = Script(10)
    with recorded() as log, Cluster(3, 1, "async", 2) as cluster:
        outcome = cluster.train(script)
    assert outcome.summary["contributions_applied"] == 30
    drawn = list(chain(*script.drawn.values()))
    assert len(set(drawn)) == 30
    assert len({applied.contribution.name for applied in log}) == 30


def test_a_slice_stays_with_the_batch_that_was_drawn_for_it() -> None:
    """Somebody joins between the draw and the step: the batch is handed in for the slice it was drawn for, or not."""
    drawn, go = threading.Event(), threading.Event()

    def hold(ctx: Context, number: int) -> None:
        if ctx.rank == 0 and number == 3:  # the last slice of the first step, which will be of the other's share
            drawn.set()
            wait(go, "the word to go on")

    script = Script(12, hold)
    with recorded() as log, Cluster(1, 1, slices_per_step=4, grace_s=0.1) as cluster:
        first = cluster.start(script)
        wait(drawn, "the fourth slice")
        late = cluster.start(Script(4))
        until("the second worker is there", lambda: len(cluster.status().view.workers) == 2)
        until("it has its first weights", lambda: late.context is not None and late.context.prepared.steps is not None)
        go.set()
        cluster.join([first, late])
    assert SyncName(0, 3, 4, 4) in [applied.contribution.name for applied in log]
    for number, rows in enumerate(script.drawn[0][:4]):
        generator = torch.Generator().manual_seed(slice_seed(0, 0, number, "batch"))
        assert rows == tuple(torch.randint(500, (8,), generator=generator).tolist())


# ---- a loader after all


def test_a_loader_may_come_later_if_nothing_was_drawn_meanwhile() -> None:
    """Then the generators are as if nothing had been seeded."""

    def script(ctx: Context) -> None:
        model: Any = network()
        torch.manual_seed(77)
        model, optimizer = ctx.prepare(model, sgd(model.parameters()))
        loader = ctx.prepare(DataLoader(dataset(16), batch_size=4))
        wanted = torch.Generator().manual_seed(77)
        assert torch.equal(torch.randint(1 << 30, (3,)), torch.randint(1 << 30, (3,), generator=wanted))
        for x, y in loader:
            loss: Any = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    inside(script)


def test_what_all_workers_should_share_is_not_drawn_by_each_of_them() -> None:
    def script(ctx: Context) -> None:
        model: Any = network()
        ctx.prepare(model, sgd(model.parameters()))
        torch.randperm(16)  # a split into training and test data, say
        ctx.prepare(DataLoader(dataset(16), batch_size=4))

    with pytest.raises(errors.DataError, match=r"were drawn between .* prepare the loader before") as caught:
        inside(script)
    assert "\n" not in str(caught.value)


def test_where_a_slice_has_no_seed() -> None:
    def early(ctx: Context) -> None:
        ctx.slice_seed()

    def outside(ctx: Context) -> None:
        model: Any = network()
        model, optimizer, loader = ctx.prepare(model, sgd(model.parameters()), DataLoader(dataset(16), batch_size=4))
        for _ in loader:
            assert ctx.slice_seed() == slice_seed(ctx.seed, 0, 0, "batch")
            optimizer.step()
            ctx.slice_seed()

    with pytest.raises(errors.UserError, match=r"belongs after ctx\.prepare"):
        inside(early)
    with pytest.raises(errors.UserError, match="belongs into the loop"):
        inside(outside)
