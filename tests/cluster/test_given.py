"""What a script may hand to ctx.prepare and keeps as it is: trained as plain torch does. Refusals: test_refused.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from tests.support.cluster.harness import train
from tests.support.cluster.programs import CLASSES, FEATURES, adamw, dataset, fill, network, sgd
from tests.support.cluster.reference import slice_by_slice, slices_of_steps

BATCH, SAMPLES, EPOCHS = 8, 32, 2
cross_entropy: Any = torch.nn.functional.cross_entropy
Make = Callable[..., torch.optim.Optimizer]


class Turned(nn.Module):
    """Its weight is a transposed view, and two others are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, CLASSES).t())
        memory = torch.zeros(2, CLASSES)
        self.bias, self.scale = nn.Parameter(memory[0]), nn.Parameter(memory[1])
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return torch.nn.functional.linear(x, self.weight, self.bias) * self.scale


class Columns(nn.Module):
    """Its parameters lie between each other in memory, and do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(FEATURES, 2 * CLASSES)
        self.left, self.right = nn.Parameter(memory[:, :CLASSES]), nn.Parameter(memory[:, CLASSES:])
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return x @ self.left + torch.tanh(x) @ self.right


def weight_norm() -> nn.Module:
    model = network()
    parametrizations.weight_norm(model[0])  # type: ignore[index]
    parametrizations.weight_norm(model[2], dim=1)  # type: ignore[index]
    return model


def old_weight_norm() -> nn.Module:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model[0])  # type: ignore[index]
    return model


def clamp_gradient(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def hooked() -> nn.Module:
    """Hooks on modules, on a parameter, before and after its gradient is added up."""
    model: Any = network()
    first, last = model[0].weight, model[2].weight
    model.register_forward_hook(lambda module, given, out: out * 2.0)
    model[2].register_full_backward_hook(lambda module, given, out: (given[0] * 3.0,))
    first.register_hook(lambda gradient: gradient * 0.5)
    last.register_post_accumulate_grad_hook(clamp_gradient)
    made: nn.Module = model
    return made


def requires_no_gradient() -> nn.Module:
    model = network()
    model.get_parameter("0.bias").requires_grad_(False)
    return model


def named(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(parameters), "note": "mine"}], lr=torch.tensor(0.1), momentum=0.5)


def flagged(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, maximize=True, foreach=True)


KEPT: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "transposed and parts of one tensor": (Turned, sgd),
    "between each other in memory": (Columns, adamw),
    "parametrizations": (weight_norm, sgd),
    "weight_norm of old": (old_weight_norm, sgd),
    "hooks": (hooked, sgd),
    "without a gradient": (requires_no_gradient, sgd),
    "a tensor as learning rate": (network, named),
    "maximize, foreach": (network, flagged),
}


def check(build: Callable[[], nn.Module], make: Make, after: Callable[[nn.Module], None] | None = None) -> None:
    """Trained by two workers and alone: close to each other."""
    data = dataset(SAMPLES)
    found: list[dict[str, Tensor]] = []

    def script(ctx: Context) -> None:
        model: Any = build()
        loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, make(model.parameters()), loader)
        if after is not None:
            after(model)
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(copy.deepcopy(model.state_dict()))

    train(script, 2, 2, slices_per_step=2)
    model = build()
    optimizer = make(model.parameters())
    if after is not None:
        after(model)
    start = copy.deepcopy(model.state_dict())
    slice_by_slice(model, optimizer, list(slices_of_steps(data, BATCH, 2, EPOCHS)), cross_entropy)
    assert any(not torch.equal(start[name], value) for name, value in model.state_dict().items())
    for state in found:
        assert state.keys() == start.keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", KEPT)
def test_kept(what: str) -> None:
    check(*KEPT[what])


def stop_one(model: nn.Module) -> None:
    model.get_parameter("0.weight").requires_grad_(False)


def add_one(model: nn.Module) -> None:
    model.register_parameter("more", nn.Parameter(torch.ones(1)))


AFTERWARDS: dict[str, Callable[[nn.Module], None]] = {
    "requires_grad_(False)": stop_one,
    "a parameter more": add_one,
}


@pytest.mark.parametrize("what", AFTERWARDS)
def test_changes_after_prepare_mean_what_they_mean_in_plain_torch(what: str) -> None:
    """The optimizer does not know new parameters, and leaves alone what has no gradient."""
    check(network, sgd, AFTERWARDS[what])


def test_a_scheduler_that_has_stepped_goes_on_from_there() -> None:
    data, rates = dataset(SAMPLES), []

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        scheduler: Any = StepLR(optimizer, step_size=2, gamma=0.5)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        loader: Any = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader, scheduler = ctx.prepare(model, optimizer, loader, scheduler)
        for _ in ctx.epochs(1):
            for x, y in loader:
                rates.append(round(optimizer.param_groups[0]["lr"], 6))
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    train(script, 1, 1)
    assert rates == [0.05, 0.025, 0.025, 0.0125]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_as_the_model_inside() -> None:
    def script(compiled: bool) -> Callable[[Context], None]:
        def run(ctx: Context) -> None:
            model: Any = network()
            given = torch.compile(model, backend="eager") if compiled else model
            loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
            given, optimizer, loader = ctx.prepare(given, sgd(model.parameters()), loader)
            for _ in ctx.epochs(EPOCHS):
                for x, y in loader:
                    cross_entropy(given(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        return run

    assert train(script(True), 1, 2).digests == train(script(False), 1, 2).digests
