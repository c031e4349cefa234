"""`optimizer.add_param_group` after `ctx.prepare`: the parameters train as those that plain torch is given then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, inside, train, until, wait
from tests.support.cluster.programs import Aligned, dataset
from tests.support.cluster.reference import slice_by_slice, slices_of_steps
from tests.support.failover.rollback import Rig
from tests.support.optimizers import OPTIMIZERS

# Four slices in an epoch, two of them in a step.
SAMPLES, BATCH, SLICES, EPOCHS = 32, 8, 2, 4
SMALL = {"training__chunk_bytes": 256}
# The epochs in which the groups are added.
WEIGHT, BIAS = 1, 2


def grow(model: Any, optimizer: Any, epoch: int) -> None:
    """Adds the groups that belong to this epoch or an earlier one, the later group of servers first."""
    if epoch >= WEIGHT and len(optimizer.param_groups) < 2:
        optimizer.add_param_group({"params": model.first.weight, "lr": 0.02})
    if epoch >= BIAS and len(optimizer.param_groups) < 3:
        optimizer.add_param_group({"params": [model.first.bias]})


class Growing:
    """``when`` adds groups at the beginning of an epoch; ``each`` is called before each step."""

    def __init__(
        self,
        name: str = "adamw",
        when: Callable[[Any, Any, int], None] = grow,
        each: Callable[[Context], object] | None = None,
    ) -> None:
        self.name, self.when, self.each = name, when, each

    def __call__(self, ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = OPTIMIZERS[self.name](model.second.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
        later = [[model.first.bias], [model.first.weight]]
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, later=later)
        for epoch in ctx.epochs(EPOCHS):
            self.when(model, optimizer, epoch)
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if self.each is not None:
                    self.each(ctx)
                optimizer.step()
                model.zero_grad()
        self.state = optimizer.state_dict()


def by_hand(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Aligned()
    optimizer = OPTIMIZERS[name](model.second.parameters())
    steps = list(slices_of_steps(dataset(SAMPLES), BATCH, SLICES, EPOCHS))
    for epoch in range(EPOCHS):
        model.zero_grad()
        grow(model, optimizer, epoch)
        slice_by_slice(model, optimizer, steps[2 * epoch : 2 * epoch + 2], F.cross_entropy)
    return model, optimizer


@pytest.mark.parametrize(
    "name", ["adamw", "sgd", *(pytest.param(name, marks=pytest.mark.long) for name in ("adagrad", "asgd", "adafactor"))]
)
def test_the_bits_of_plain_torch(name: str) -> None:
    """No decay, no momentum and no state before; then hyper-parameters of their own."""
    script = Growing(name)
    outcome = train(script, 2, 2, SMALL, slices_per_step=SLICES)
    model, optimizer = by_hand(name)
    for key, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(key), parameter.detach()), key
    ours, theirs = script.state, optimizer.state_dict()
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    another = OPTIMIZERS[name](Aligned().second.parameters())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        another.load_state_dict(ours)


def test_after_going_back_before_a_group_was_added(tmp_path: Path) -> None:
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 5 and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    with Rig(tmp_path, 3, training__slices_per_step=SLICES) as rig:
        rig.begin(Growing(each=stop))
        wait(reached, "step 5", 60.0)
        rig.goes_back()
        go.set()
        rig.finish()
    model, _ = by_hand("adamw")
    for key, parameter in model.named_parameters():
        assert torch.equal(rig.final(key), parameter.detach()), key


def test_a_worker_that_lacks_a_group_of_an_earlier_epoch_is_refused() -> None:
    """It comes late, and its script adds the group in one epoch only."""
    come = threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.rank == 0 and ctx.version == 5:
            come.set()
            until("the other worker has come and gone", lambda: cluster.workers[1:] and not cluster.workers[1].alive)

    def only_then(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == WEIGHT:
            optimizer.add_param_group({"params": [model.first.weight]})

    script = Growing(when=only_then, each=stop)
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        first = cluster.start(script)
        wait(come, "step 5")
        late = cluster.start(script)
        cluster.join([first])
        with pytest.raises(errors.UserError, match=r"another worker has added 1 parameter groups before epoch 3"):
            cluster.join([late])


def test_refused() -> None:
    def prepare(ctx: Context, later: Any) -> Any:
        model: Any = Aligned()
        optimizer: Any = OPTIMIZERS["adamw"](model.second.parameters())
        return ctx.prepare(model, optimizer, later=later(model))

    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda model: [model.first, model.first], r"later\[1\] .* give each parameter once"),
        (lambda model: [[model.second.weight]], r"later\[0\] .* give each parameter once"),
        (lambda model: [[]], "has to be the parameters of a group"),
        (lambda model: [3], "has to be the parameters of a group"),
    ]

    def work(ctx: Context) -> None:
        for later, sentence in cases:
            with pytest.raises(errors.ModelError, match=sentence):
                prepare(ctx, later)
        with pytest.raises(errors.UserError, match="that gets the model"):
            ctx.prepare(DataLoader(dataset(8)), later=[[nn.Parameter(torch.ones(1))]])
        model, optimizer = prepare(ctx, lambda model: [model.first])
        for given in (nn.Parameter(torch.ones(1)), [model.first.weight], list(model.second.parameters())):
            with pytest.raises(errors.ModelError, match="has to be named there"):
                optimizer.add_param_group({"params": given})
        with pytest.raises(errors.ModelError, match="amsgrad cannot change"):
            optimizer.add_param_group({"params": list(model.first.parameters()), "amsgrad": True})
        assert len(optimizer.param_groups) == 1
        ctx.prepare(StepLR(optimizer, 1))
        with pytest.raises(errors.ModelError, match="a prepared scheduler has a learning rate for each group"):
            optimizer.add_param_group({"params": list(model.first.parameters())})

    inside(work)
