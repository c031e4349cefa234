"""Learning rates that would depend on which worker computes which slice are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, train
from tests.support.cluster.programs import dataset, network, sgd

SAMPLES, BATCH = 48, 4
UNKNOWN = r"^the optimizer has a scheduler that ctx.prepare does not know: .* scheduler = ctx.prepare\(scheduler\)$"

After = Callable[[Context, Any, Any], object]


def nothing(ctx: Context, optimizer: Any, scheduler: Any) -> None:
    pass


def advance(ctx: Context, optimizer: Any, scheduler: Any) -> None:
    scheduler.step()


class Script:
    """``slice`` is called after each slice, ``epoch`` after each epoch; a scheduler is made if one of them advances it.

    ``first``: before prepare. ``known``: it is prepared. ``plain``: the loop is not over ctx.epochs.
    """

    def __init__(
        self,
        slice: After = nothing,
        epoch: After = nothing,
        first: bool = True,
        known: bool = False,
        plain: bool = True,
    ) -> None:
        self.slice, self.epoch, self.first, self.known, self.plain = slice, epoch, first, known, plain

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        scheduler: Any = self.make(optimizer) if self.first else None
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        scheduler = scheduler or self.make(optimizer)
        if self.known:
            scheduler = ctx.prepare(scheduler)
        for _ in range(2) if self.plain else ctx.epochs(2):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                self.slice(ctx, optimizer, scheduler)
            self.epoch(ctx, optimizer, scheduler)

    def make(self, optimizer: Any) -> Any:
        if advance not in (self.slice, self.epoch):
            return None
        return CosineAnnealingLR(optimizer, 20) if self.slice is advance else ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("first", [True, False], ids=["before prepare", "after it"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain loop", "ctx.epochs"])
@pytest.mark.parametrize("place", ["slice", "epoch"])
def test_a_scheduler_has_to_be_prepared(mode: str, first: bool, plain: bool, place: str) -> None:
    """Torch has no list of an optimizer's schedulers, so nobody but the script can give it."""
    with pytest.raises(errors.UserError, match=UNKNOWN):
        train(Script(first=first, plain=plain, **{place: advance}), 1, 1, slices_per_step=2, mode=mode)  # type: ignore[arg-type]


def test_the_schedulers_of_each_optimizer_have_to_be_prepared() -> None:
    def script(ctx: Context) -> None:
        schedulers = []
        for name in ("first", "second"):
            model: Any = network()
            optimizer = sgd(model.parameters())
            schedulers.append(ExponentialLR(optimizer, 0.5))
            given = [model, optimizer] + [DataLoader(dataset(SAMPLES), batch_size=BATCH)] * (name == "second")
            prepared = ctx.prepare(*given, name=name)
            made.append(prepared)
        ctx.prepare(schedulers[0])
        for x, y in made[1][2]:
            for model, optimizer, *_ in made:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

    made: list[Any] = []
    with pytest.raises(errors.UserError, match=UNKNOWN):
        train(script, 1, 1)


@pytest.mark.parametrize("plain", [True, False], ids=["plain loop", "ctx.epochs"])
def test_a_prepared_scheduler_may_be_stepped_once_per_epoch(plain: bool) -> None:
    found = [train(Script(epoch=advance, known=True, plain=plain), workers, 1, slices_per_step=2) for workers in (1, 2)]
    assert found[0].digests == found[1].digests


def by_version(ctx: Context, optimizer: Any, scheduler: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + ctx.version)


def test_a_rate_by_hand_that_counts_slices_is_refused() -> None:
    count = iter(range(2, 100))

    def by_slices(ctx: Context, optimizer: Any, scheduler: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / next(count)

    with pytest.raises(errors.UserError, match=r"two slices of step 0 have .* rates 0.1 and 0.05\), .* ctx.version"):
        train(Script(slice=by_slices), 1, 1, slices_per_step=2)


def test_a_rate_by_hand_that_counts_versions_is_the_same_for_any_number_of_workers() -> None:
    found: list[Outcome] = [train(Script(slice=by_version), workers, 2, slices_per_step=2) for workers in (1, 2)]
    assert found[0].digests == found[1].digests


@pytest.mark.parametrize("servers", [1, 2])
def test_two_workers_with_different_rates_are_told(servers: int) -> None:
    """Each has one slice of a step, and only servers see both."""

    def by_rank(ctx: Context, optimizer: Any, scheduler: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 if ctx.rank == 0 else 0.2

    with pytest.raises(
        errors.ModelError, match=r"two workers differ in step \d+: lr of parameter group 0 is 0.[12] and"
    ):
        train(Script(slice=by_rank), 2, servers, slices_per_step=2)
