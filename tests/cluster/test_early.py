"""Gradients that leave while the backward pass computes them: the same bits, whatever the script does to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.worker.context import Context
from paramserver.worker.flat import PartialSum, PartialSumPool
from paramserver.worker.gradients import early
from tests.support.cluster.early import DATA, OPTIONS, clip, counted, script
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import train, train_without
from tests.support.cluster.programs import LedgerProgram, Program, adamw, model_of, network, optimizer_of
from tests.support.cluster.small_job import Death
from tests.support.contract.movers import imagine


@pytest.fixture(
    autouse=True,
    params=[pytest.param(False, id="in main memory"), pytest.param(True, id="on a device", marks=pytest.mark.long)],
)
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """See `counted`. Every test has contributions that leave early, also from an imagined device that is late."""
    found = counted(monkeypatch)
    movers = imagine(monkeypatch) if request.param else []
    yield found
    assert found["begun"] > 0
    assert [mover.mistakes for mover in movers] == [[] for _ in movers]
    assert bool(movers) == request.param


# The digests of the same training without anything of this.
plainly = partial(train_without, early)


def test_same_bits(monkeypatch: pytest.MonkeyPatch, count: Counter[str]) -> None:
    assert train(script(), **OPTIONS).digests == plainly(script(), monkeypatch, **OPTIONS)
    # Two workers, six steps, and nobody knows before the first one what a contribution consists of.
    assert count == {"begun": 2 * 5, "sealed": 2 * 5}


def test_asynchronously_too(monkeypatch: pytest.MonkeyPatch, count: Counter[str]) -> None:
    options = {**OPTIONS, "workers": 1, "mode": "async"}
    assert train(script(), **options).digests == plainly(script(), monkeypatch, **options)
    assert count == {"begun": 11, "sealed": 11}
    outcome = train(LedgerProgram(120, 2, 2), 3, 2, mode="async", settings={"training.chunk_bytes": 64})
    assert count["sealed"] > 100
    assert torch.equal(outcome.tensor("cells"), torch.full((120,), 2.0))


def of(ctx: Context) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model_of(ctx).parameters() if parameter.requires_grad]


def hidden(ctx: Context, number: int) -> None:
    """Leaves no trace in the version of a tensor."""
    for parameter in of(ctx):
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.001, 0.001)


def dropped(ctx: Context, number: int) -> None:
    if ctx.version % 2:
        of(ctx)[0].grad = None


def clipped(ctx: Context, number: int) -> None:
    if ctx.version == 2:
        clip(ctx, number)


@pytest.mark.parametrize("meddle", [hidden, dropped, clipped])
def test_what_the_script_does_to_gradients_counts(
    meddle: Any, monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    digests = train(script(meddle), **OPTIONS).digests
    assert count["sealed"] < count["begun"]
    assert digests == plainly(script(meddle), monkeypatch, **OPTIONS)
    assert digests != plainly(script(), monkeypatch, **OPTIONS)


def test_a_learning_rate_that_the_script_sets_before_each_step_counts(
    monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    def lower(ctx: Context, number: int) -> None:
        optimizer_of(ctx).param_groups[0]["lr"] = 0.01 / (1 + ctx.version)

    digests = train(script(lower), **OPTIONS).digests
    assert count["sealed"] == 0
    # Not tried again and again in vain: in the second slice, and in the fifth, after two without.
    assert count["begun"] == 2 * 2
    assert digests == plainly(script(lower), monkeypatch, **OPTIONS)


class Now(nn.Module):
    """Changes its buffer for some batches only, so that nobody can know what a contribution consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(hidden=40)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the classes."""
        if x.sum() > 0:
            self.seen.add_(1.0)
        return self.layers(x)


def test_a_contribution_of_other_tensors_than_those_expected_is_pushed_once_and_its_memory_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    free: dict[int, PartialSum] = {}
    take, give, lend = PartialSumPool.take, PartialSumPool.give, PartialSumPool.lend

    def taken(self: PartialSumPool) -> PartialSum:
        partial = take(self)
        free.pop(id(partial.space), None)
        return partial

    def given(self: PartialSumPool, partial: PartialSum) -> None:
        assert id(partial.space) not in free
        free[id(partial.space)] = partial
        give(self, partial)

    def lent(self: PartialSumPool, partial: PartialSum, step: int, sent: Callable[[], bool]) -> None:
        assert id(partial.space) not in free
        free[id(partial.space)] = partial
        lend(self, partial, step, sent)

    monkeypatch.setattr(PartialSumPool, "take", taken)
    monkeypatch.setattr(PartialSumPool, "give", given)
    monkeypatch.setattr(PartialSumPool, "lend", lent)
    program = Program(DATA, 4, 3, Now, adamw)
    options = {**OPTIONS, "slices_per_step": 2}
    digests = train(program, **options).digests
    assert free
    assert 0 < count["sealed"] < count["begun"]
    assert digests == plainly(program, monkeypatch, **options)


def test_clipped_by_the_servers_they_leave_early_all_the_same(
    monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    digests = train(script(clip), **OPTIONS).digests
    assert count == {"begun": 2 * 5, "sealed": 2 * 5}
    assert digests == plainly(script(clip), monkeypatch, **OPTIONS)


def test_a_second_backward_pass_counts(monkeypatch: pytest.MonkeyPatch, count: Counter[str]) -> None:
    def again(ctx: Context, number: int) -> None:
        sum(parameter.square().sum() for parameter in of(ctx)).backward()  # type: ignore[union-attr]

    digests = train(script(again), **OPTIONS).digests
    assert count["sealed"] == 0
    assert digests == plainly(script(again), monkeypatch, **OPTIONS)


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("Shard.P*", Fault.LOSE_REPLY, 0.2)],
        [Rule("Shard.P*", Fault.DUPLICATE, 0.3)],
        [Rule("Shard.Push", Fault.CUT_UPLOAD, 0.3)],
        [Rule("Shard.P*", Fault.DROP_REQUEST, 0.2)],
    ],
    ids=["replies lost", "sent twice", "uploads cut short", "dropped"],
)
def test_over_a_bad_network(rules: list[Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan(rules, seed=5)
    outcome = train(script(), **OPTIONS, faults=plan)
    plan.check()
    assert outcome.digests == plainly(script(), monkeypatch, **OPTIONS)


def test_a_worker_dies_when_its_gradients_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said that they are right: another computes the slice."""
    death = Death(3)
    outcome = train(script(death), **OPTIONS, grace_s=0.1)
    assert death.died
    assert outcome.digests == plainly(script(), monkeypatch, **OPTIONS)
