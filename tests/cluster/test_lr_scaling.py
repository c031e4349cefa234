"""`training.lr_scaling`: learning rates for another number of slices than the script's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from paramserver.cli.look.facts import describe, render
from paramserver.core.layout.lr_scaling import LrScaling
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, train
from tests.support.cluster.programs import Program, cosine, dataset, model_of, network, optimizer_of, sgd
from tests.support.cluster.reference import slices_of_steps

SAMPLES, BATCH, SLICES, EPOCHS, STEPS = 96, 4, 4, 2, 12


def settings(scaling: LrScaling) -> dict[str, object]:
    return {
        "training.lr_scaling": scaling.rule,
        "training.lr_base_slices": scaling.base_slices,
        "training.lr_warmup_steps": scaling.warmup_steps,
    }


def by_hand(scaling: LrScaling) -> nn.Module:
    """Plain torch with learning rates that are multiplied for each step."""
    model = network()
    optimizer = sgd(model.parameters())
    schedule = cosine(optimizer, STEPS)
    for version, batches in enumerate(slices_of_steps(dataset(SAMPLES), BATCH, SLICES, EPOCHS)):
        optimizer.zero_grad()
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        (group,) = optimizer.param_groups
        rate = group["lr"]
        group["lr"] = rate * scaling.factor(SLICES, SLICES, version)
        optimizer.step()
        group["lr"] = rate
        schedule.step()
    return model


def one_update(ctx: Context) -> None:
    """Moves the only weight from 0 to the negative learning rate."""
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("scaling", [LrScaling("linear", 2, 5), LrScaling("sqrt")], ids=["linear", "sqrt"])
def test_the_servers_multiply_and_the_script_does_not_see_it(scaling: LrScaling) -> None:
    rates: set[float] = set()

    def note(ctx: Context, slices: int) -> None:
        rates.add(optimizer_of(ctx).param_groups[0]["lr"])
        assert model_of(ctx) is not None

    program = Program(dataset(SAMPLES), BATCH, EPOCHS, network, sgd, cosine, each=note)
    outcome = train(program, 2, 2, settings(scaling), slices_per_step=SLICES)
    for name, parameter in by_hand(scaling).named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-4, atol=1e-5)
    assert max(rates) == 0.1
    assert outcome.digests == train(program, 1, 1, settings(scaling), slices_per_step=SLICES).digests
    assert outcome.digests != train(program, 1, 1, slices_per_step=SLICES).digests


def test_asynchronous_updates_have_one_slice() -> None:
    """They are scaled to the script's number of slices, too: to a fourth."""

    scaling = settings(LrScaling("linear", 4))
    assert train(one_update, 1, 1, scaling, mode="async").tensor("weight").item() == -0.25
    assert train(one_update, 1, 1, scaling, slices_per_step=1).tensor("weight").item() == -0.25


def test_the_status_shows_the_effective_batch_and_the_factor() -> None:
    scaling = LrScaling("linear", warmup_steps=8)
    seen: list[tuple[int, float, float]] = []

    def look(ctx: Context, slices: int) -> None:
        if ctx.rank == 0:
            status = cluster.status()
            seen.append((status.effective_batch, status.lr_factor, status.lr_factor_whole))

    program = Program(dataset(SAMPLES), BATCH, EPOCHS, each=look)
    with Cluster(1, 1, slices_per_step=SLICES, lr_scaling=scaling) as cluster:
        cluster.train(program, settings(scaling))
        last = cluster.status()
    assert {batch for batch, _, _ in seen} == {BATCH * SLICES}
    assert {whole for _, _, whole in seen} == {4.0}
    assert seen[0][1] == 1.0
    assert last.lr_factor == 4.0
    last.lr_factor = 2.5
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(describe(last)))
    assert "effective batch: 16 samples; learning rates times 2.5, 4 after the warm-up" in capture.get()


def test_the_rules() -> None:
    assert LrScaling().factor(8, 8, 0) == 1.0
    assert LrScaling("linear", 2).whole(8, 8) == 4.0
    assert LrScaling("sqrt", 2).whole(8, 8) == 2.0
    assert math.isclose(LrScaling("sqrt", 8).whole(2, 2), 0.5)
    assert [LrScaling("linear", 0).whole(slices, 4) for slices in (4, 1)] == [1.0, 0.25]
    rising = [LrScaling("linear", 1, 4).factor(3, 3, version) for version in range(6)]
    assert rising == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]


@pytest.mark.parametrize(("began", "moved"), [("sync", -0.25), ("async", -1.0)])
def test_a_job_that_began_as_synchronous_divides_by_the_slices_of_a_step_while_it_is_asynchronous(
    began: str, moved: float
) -> None:
    """``training.lr_scaling = "auto"``, the default. A mode that changed is the present one, not that of the start."""

    given = {"consistency.mode": began}
    assert train(one_update, 1, 1, given, mode="async", slices_per_step=4).tensor("weight").item() == moved
    assert train(one_update, 1, 1, given, slices_per_step=1).tensor("weight").item() == -1.0
