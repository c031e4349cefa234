"""Synchronous training is what one process with plain PyTorch does with the same global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, digest, train
from tests.support.cluster.programs import (
    CLASSES,
    FEATURES,
    Aligned,
    Optimizer,
    Program,
    Schedule,
    adamw,
    cosine,
    dataset,
    fill,
    network,
    sgd,
)
from tests.support.cluster.reference import Batch, slice_by_slice, slices_of_steps, whole_batches

# 10 slices, the last one of 6 samples, make 3 steps of an epoch, the last one of 2 slices.
SAMPLES, BATCH, SLICES, STEPS_PER_EPOCH = 78, 8, 4, 3
LONG, SHORT = 17, 5  # epochs
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}

CASES: list[tuple[Optimizer, Schedule | None]] = [(sgd, None), (adamw, cosine)]
Build = Callable[[], nn.Module]


def steps(data: TensorDataset, epochs: int) -> list[list[Batch]]:
    return list(slices_of_steps(data, BATCH, SLICES, epochs))


def compare(
    build: Build,
    optimizer: Optimizer,
    schedule: Schedule | None = None,
    dtype: torch.dtype = torch.float32,
    epochs: int = SHORT,
) -> Outcome:
    """Train on a cluster and in one process, as users do; all parameters must be close."""
    data = dataset(SAMPLES, dtype)
    outcome = train(Program(data, BATCH, epochs, build, optimizer, schedule), 3, 2, slices_per_step=SLICES)
    assert outcome.summary["steps"] == epochs * STEPS_PER_EPOCH
    start, model = dict(build().named_parameters()), build()
    plain = optimizer(model.parameters())
    scheduler = schedule(plain, epochs * STEPS_PER_EPOCH) if schedule else None
    whole_batches(model, plain, steps(data, epochs), F.cross_entropy, scheduler)
    for name, parameter in model.named_parameters():
        found = outcome.tensor(name).to(dtype)
        torch.testing.assert_close(found, parameter.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 0.1)
        trained = any(parameter is p for group in plain.param_groups for p in group["params"])
        if trained and parameter.requires_grad:
            assert not torch.equal(found, start[name]), f"{name} has not been trained"
    return outcome


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(("optimizer", "schedule"), CASES, ids=["sgd", "adamw-cosine"])
def test_close_to_a_single_process(optimizer: Optimizer, schedule: Schedule | None, dtype: torch.dtype) -> None:
    compare(lambda: network(dtype=dtype), optimizer, schedule, dtype, LONG)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.long), torch.float32], ids=str)
@pytest.mark.parametrize(("optimizer", "schedule"), CASES, ids=["sgd", "adamw-cosine"])
def test_equal_bits_if_the_slices_are_summed_in_the_same_tree(
    optimizer: Optimizer, schedule: Schedule | None, dtype: torch.dtype
) -> None:
    """In one process with torch's own optimizer, fused, as servers use it."""
    data = dataset(SAMPLES, dtype)
    program = Program(data, BATCH, LONG, lambda: Aligned(dtype), optimizer, schedule)
    outcome = train(program, 3, 2, slices_per_step=SLICES)
    model = Aligned(dtype)
    plain = optimizer(model.parameters(), fused=True)
    scheduler = schedule(plain, LONG * STEPS_PER_EPOCH) if schedule else None
    slice_by_slice(model, plain, steps(data, LONG), F.cross_entropy, scheduler)
    for name, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(name), parameter.detach()), name
    assert outcome.summary["weights_sha256"] == digest(*model.parameters())
    state = [plain.state[p][key] for p in model.parameters() for key in sorted(plain.state[p])]
    assert outcome.summary["optimizer_sha256"] == digest(*state)


def two_groups(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.dim() == 1], "lr": 0.3, "momentum": 0.0},
        {"params": [p for p in given if p.dim() > 1], "weight_decay": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def test_parameter_groups() -> None:
    compare(network, two_groups)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_tied_weights() -> None:
    outcome = compare(lambda: fill(Tied()), adamw)
    names = [(spec.name, spec.aliases) for spec in outcome.result.layout.tensors]
    assert names[0] == ("first.weight", ("second.weight",))
    assert len(names) == 3


class Partly(Aligned):
    """``rare`` takes part in a slice only if one of its samples has a large first feature; ``never`` in none."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(16))
        self.never = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out * self.rare.mean() if rare(x) else out


def rare(x: Tensor) -> bool:
    return bool((x[:, 0] > 1.5).any())


def test_parameters_that_some_or_all_slices_do_not_use() -> None:
    """No gradient counts as zero where others have one, and as none where nobody has one: then nothing decays."""
    data = dataset(SAMPLES)
    program = Program(data, BATCH, SHORT, Partly, adamw)
    used = [[rare(x) for x, _ in batches] for batches in steps(data, SHORT)]
    assert any(any(step) and not all(step) for step in used), "some steps use it in some slices"
    assert any(not any(step) for step in used), "some steps do not use it at all"
    outcomes = [train(program, workers, servers, slices_per_step=SLICES) for workers, servers in ((1, 1), (4, 2))]
    assert outcomes[0].digests == outcomes[1].digests
    model = Partly()
    slice_by_slice(model, adamw(model.parameters(), fused=True), steps(data, SHORT), F.cross_entropy)
    for name, parameter in model.named_parameters():
        assert torch.equal(outcomes[0].tensor(name), parameter.detach()), name
    assert torch.equal(outcomes[0].tensor("never"), torch.ones(3, 5))


def test_a_frozen_parameter_keeps_its_bytes() -> None:
    """Frozen by leaving it out of the optimizer, and by requires_grad = False."""

    def build() -> nn.Module:
        model = network()
        model.get_parameter("2.bias").requires_grad_(False)
        return model

    def all_but_the_first(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters)[1:], lr=0.01, weight_decay=0.1)

    outcome = compare(build, all_but_the_first)
    start = dict(build().named_parameters())
    for name in ("0.weight", "2.bias"):
        assert torch.equal(outcome.tensor(name), start[name].detach()), name


SCHEDULES: dict[str, Schedule] = {
    "step": lambda optimizer, steps: StepLR(optimizer, step_size=7, gamma=0.5),
    "one-cycle": lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.2, total_steps=steps),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_per_step_without_a_warning_of_torch(name: str) -> None:
    """They are built before prepare, on the script's own optimizer. Warnings are errors here."""
    compare(network, sgd, SCHEDULES[name])


@pytest.mark.parametrize("plain_loop", [True, False], ids=["plain loop", "ctx.epochs"])
def test_a_scheduler_per_epoch(plain_loop: bool) -> None:
    data = dataset(SAMPLES)

    def script(ctx: Context) -> None:
        model = network()
        optimizer = sgd(model.parameters())
        scheduler = StepLR(optimizer, step_size=1, gamma=0.8)
        loader = ctx.prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
        model, optimizer = ctx.prepare(model, optimizer)
        scheduler = ctx.prepare(scheduler)
        for _ in range(SHORT) if plain_loop else ctx.epochs(SHORT):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    outcome = train(script, 3, 2, slices_per_step=SLICES)
    model = network()
    plain = sgd(model.parameters())
    schedule: LRScheduler = StepLR(plain, step_size=1, gamma=0.8)
    batches = steps(data, SHORT)
    for epoch in range(SHORT):
        slice_by_slice(model, plain, batches[STEPS_PER_EPOCH * epoch :][:STEPS_PER_EPOCH], F.cross_entropy)
        schedule.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(key), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_several_schedulers_and_one_per_group() -> None:
    """What hyper-parameters a step has is what its workers' parameter groups say."""

    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.97**step])

    compare(network, two_groups, schedule)
