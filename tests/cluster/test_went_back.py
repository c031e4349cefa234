"""What a script computes between going back and its next batch: it counts for no epoch, and is never given again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import train
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig, same

EPOCHS, SLICES = 5, 4
# Of an epoch.
STEPS = 2
NEVER = 10_000
# By worker and epoch: what ctx.evaluate gave, the same computed here, the agreed loss, and the learning rate.
Row = tuple[float, float, float, float]


class Script:
    """Evaluates after each epoch. A server dies in the middle of the third epoch."""

    def __init__(self, dies: Callable[[], object] | None = None, end: Callable[[Context, int], object] | None = None):
        """``end`` is called at the end of each epoch; True leaves the loop."""
        self.dies, self.end = dies, end
        self.rows: dict[tuple[int, int], Row] = {}
        self.lost: list[Row] = []
        self.agreed: list[list[float]] = []
        self.test = DataLoader(dataset(24), batch_size=8)

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(64), batch_size=8, shuffle=True)
        plateau: Any = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        model, optimizer, loader, plateau = ctx.prepare(model, optimizer, loader, plateau)
        for epoch in ctx.epochs(EPOCHS):
            for number, (x, y) in enumerate(loader):
                if epoch == 2 and number == 1 and self.dies is not None:
                    self.dies()
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            row = self.evaluated(ctx, model)
            ctx.log(val=row[0])
            plateau.step(row[0])
            row = (*row, float(optimizer.param_groups[0]["lr"]))
            if ctx.went_back:
                self.lost.append(row)
            else:
                self.rows[ctx.rank, epoch] = row
            if self.end is not None and self.end(ctx, epoch):
                break
        self.agreed.append(ctx.agreed("loss"))

    def evaluated(self, ctx: Context, model: Any) -> Any:
        """What `ctx.evaluate` and `ctx.agree` give, and the same computed here."""
        with torch.no_grad():
            for x, y in ctx.evaluate(self.test):
                ctx.gather(float(F.cross_entropy(model(x), y, reduction="sum")))
            here = sum(float(F.cross_entropy(model(x), y, reduction="sum")) for x, y in self.test)
        loss = sum(ctx.gathered)
        if not ctx.went_back and ctx.version != STEPS * (ctx._passes.epoch + 1):
            here = loss  # others have trained on: it has their results, and newer weights
        return loss, here, ctx.agree(loss, "loss")


class Dying:
    """Kills a server once, and returns when the job went back."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.done = False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self.rig.goes_back()


def test_an_evaluation_of_an_epoch_that_was_undone_is_not_given_again(tmp_path: Path) -> None:
    quiet = Script()
    wanted = train(quiet, slices_per_step=SLICES).summary
    with Rig(tmp_path, NEVER) as rig:
        script = Script(Dying(rig))
        rig.begin(script)
        service = rig.leader.service
        summary = rig.finish()
    assert service is not None
    curve = [point.value for point in service.job.records.history.points("val")]
    assert script.lost, "some worker was in the middle of the third epoch"
    for (_, epoch), row in script.rows.items():
        assert row == quiet.rows[0, epoch]
        assert row[0] == pytest.approx(row[1])
    assert {epoch for _, epoch in script.rows} == set(range(EPOCHS))
    assert all(agreed == quiet.agreed[0] for agreed in script.agreed)
    assert curve == [row[0] for _, row in sorted(quiet.rows.items())], "the curve that the page shows"
    same(summary, wanted)


def test_a_script_that_leaves_its_loop_in_an_epoch_that_was_undone_is_told_so(tmp_path: Path) -> None:
    with Rig(tmp_path, NEVER, workers=1) as rig:
        script = Script(Dying(rig), end=lambda ctx, epoch: epoch == 2)
        rig.begin(script)
        rig.hands[0].join(60.0)
        error = rig.hands[0].error
    assert isinstance(error, errors.JobFailedError)
    assert "right after the job went back to version 0" in str(error)


def test_a_load_in_an_epoch_that_was_undone_waits_until_the_epoch_comes_again(tmp_path: Path) -> None:
    loaded: list[int] = []

    def end(ctx: Context, epoch: int) -> None:
        if epoch == 2:
            state = {name: torch.zeros_like(value) for name, value in ctx.state_dict()["model"].items()}
            ctx.load(model=state)
            loaded.append(int(all(not bool(value.any()) for value in ctx.state_dict()["model"].values())))

    quiet = Script(end=end)
    wanted = train(quiet, slices_per_step=SLICES).summary
    loaded.clear()
    with Rig(tmp_path, NEVER, workers=1) as rig:
        rig.begin(Script(Dying(rig), end=end))
        summary = rig.finish()
    assert loaded == [0, 1], "nothing is loaded in the epoch that was undone"
    same(summary, wanted)
