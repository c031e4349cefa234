"""What scripts for DistributedDataParallel expect, by its documentation and its tests, and what becomes of it here.

docs/migration.md has a row for each test.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from paramserver.worker.context import Context
from paramserver.worker.gradients import early
from tests.support.cluster.harness import Outcome, train
from tests.support.cluster.programs import CLASSES, FEATURES, Aligned, fill, generator, plain
from tests.support.pieces.as_ddp import (
    BATCH,
    DATA,
    EPOCHS,
    SAMPLES,
    SLICES,
    Backward,
    Build,
    Script,
    compare,
    cross_entropy,
    of_the_loss,
)

# ---- backward passes


def several_forward_passes(model: Any, x: Tensor, y: Tensor) -> None:
    first, second = model(x), model(2 * x)
    (cross_entropy(first, y) + cross_entropy(second, y)).backward()


def a_parameter_outside_of_the_forward_pass(model: Any, x: Tensor, y: Tensor) -> None:
    (cross_entropy(model(x), y) + 0.1 * model.second.weight.square().sum()).backward()


def a_penalty_on_gradients(model: Any, x: Tensor, y: Tensor) -> None:
    loss = cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalties = [gradient.square().sum() for gradient in gradients]
    (loss + 0.1 * torch.stack(penalties).sum()).backward()


def gradients_by_hand(model: Any, x: Tensor, y: Tensor) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(cross_entropy(model(x), y), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = 0.5 * gradient


def a_functional_call(model: Any, x: Tensor, y: Tensor) -> None:
    of_the_loss(lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)), x, y)


def a_sum_over_the_batch(model: Any, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y, reduction="sum").backward()


def in_evaluation_mode(model: Any, x: Tensor, y: Tensor) -> None:
    model.eval()
    of_the_loss(model, x, y)
    model.train()


BACKWARD: list[Backward] = [
    several_forward_passes,
    a_parameter_outside_of_the_forward_pass,
    a_penalty_on_gradients,
    gradients_by_hand,
    a_functional_call,
    a_sum_over_the_batch,
    in_evaluation_mode,
]


@pytest.mark.parametrize("backward", BACKWARD, ids=lambda backward: backward.__name__)
def test_backward_passes_of_all_kinds(backward: Backward) -> None:
    compare(Script(backward=backward))


def zeros_first(model: Any, x: Tensor, y: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    of_the_loss(model, x, y)


class Rarely(Aligned):
    """Some slices use a parameter, and others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out * self.rare.mean() if bool((x[:, 0] > 1.5).any()) else out


def test_a_gradient_of_zeros_counts_and_none_does_not() -> None:
    """``zero_grad(set_to_none=False)``: then weights decay in each step, also those that no slice uses."""
    given = compare(Script(Rarely, zeros_first)).tensor("rare")
    assert not torch.equal(given, compare(Script(Rarely)).tensor("rare"))


@dataclasses.dataclass
class Scores:
    scores: Tensor
    more: Any


Pair = collections.namedtuple("Pair", "scores x")


class Nested(Aligned):
    """Gives scores within other objects, results that nobody uses, and a tensor without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(FEATURES, 16)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": Scores(scores, [Pair(scores, x), (self.aside(x),)]), "constant": torch.zeros(3)}


def test_outputs_of_all_kinds_some_of_them_unused() -> None:
    def backward(model: Any, x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x)["scores"].more[0].scores, y).backward()

    outcome = compare(Script(Nested, backward))
    start = Nested().aside
    assert torch.equal(outcome.tensor("aside.weight"), start.weight), "no gradient, and no decay of weights"


@pytest.mark.parametrize("leaves_early", [False, True])
def test_hooks_on_parameters_change_what_is_sent(leaves_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that the script registers after ours, in a contribution that leaves during the backward pass."""
    monkeypatch.setattr(early, "LEAST_BYTES", 0 if leaves_early else 1 << 40)

    def doubled(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)

    def register(model: Any) -> None:
        model.first.weight.register_hook(lambda gradient: 0.5 * gradient)
        model.second.weight.register_post_accumulate_grad_hook(doubled)

    compare(Script(prepared=register))


def test_hooks_of_modules_run_once_in_each_batch() -> None:
    seen: collections.Counter[str] = collections.Counter()

    def register(model: Any) -> None:
        model.first.register_forward_hook(lambda *_: seen.update(["forward"]))
        model.second.register_full_backward_hook(lambda *_: seen.update(["backward"]))

    train(Script(prepared=register), 1, 1, slices_per_step=SLICES)
    assert seen == {"forward": EPOCHS * SAMPLES // BATCH, "backward": EPOCHS * SAMPLES // BATCH}


def test_a_parameter_that_only_the_first_of_several_batches_uses() -> None:
    """``require_backward_grad_sync``, which some scripts set instead of ``no_sync``, does no harm."""

    class Net(Aligned):
        def __init__(self) -> None:
            super().__init__()
            self.rare, self.calls = nn.Parameter(torch.ones(16)), 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return super().forward(x) * (self.rare.mean() if self.calls % 2 else 1.0)

    def script(ctx: Context) -> None:
        model: Any = Net()
        optimizer: Any = plain(model.parameters(), lr=0.1)
        loader: Any = DataLoader(DATA, batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=2)
        for x, y in loader:
            model.require_backward_grad_sync = ctx.step_due
            (cross_entropy(model(x), y) / 2).backward()
            if ctx.step_due:
                optimizer.step()
                optimizer.zero_grad()

    outcome, model = train(script, 1, 2, slices_per_step=1), Net()
    optimizer = plain(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(DataLoader(DATA, batch_size=BATCH)):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(outcome.tensor("rare"), torch.ones(16))


# ---- models


class Mixed(nn.Module):
    """Parameters of two element types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16, dtype=torch.float64)
        self.second = nn.Linear(16, CLASSES)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x.double())).float())


class Hollow(Aligned):
    """A layer without outputs: its parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.hollow = nn.Parameter(torch.empty(0, FEATURES))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + F.linear(x, self.hollow).sum()


def normed() -> nn.Module:
    return fill(nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 16)), nn.Linear(16, CLASSES)))


@pytest.mark.parametrize("build", [Mixed, Hollow, normed], ids=lambda build: build.__name__)
def test_models_of_all_kinds(build: Build) -> None:
    compare(Script(build), exact=False)


class Pictures(nn.Module):
    """A convolution over four channels, in either memory format."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, CLASSES)
        fill(self)
        self.to(memory_format=memory_format)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.conv(x.repeat(1, 2).view(-1, 4, 2, 2))).mean((2, 3)))


def test_workers_may_have_other_memory_formats() -> None:
    """DDP wants the same strides in all processes."""
    formats = [torch.contiguous_format, torch.channels_last]

    def trained(size: int) -> Outcome:
        return train(lambda ctx: Script(lambda: Pictures(formats[ctx.rank]))(ctx), size, 1, slices_per_step=SLICES)

    alone, both = trained(1), trained(2)
    for name, _ in Pictures(formats[0]).named_parameters():
        torch.testing.assert_close(both.tensor(name), alone.tensor(name), rtol=1e-4, atol=1e-5, msg=name)


def test_a_buffer_that_the_forward_pass_makes_anew() -> None:
    """DDP sends the buffers that the model had when it was wrapped, so it loses this one."""

    class Counting(Aligned):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(16))

        def forward(self, x: Tensor) -> Any:
            self.calls = self.calls + 1
            return super().forward(x)

    steps = EPOCHS * SAMPLES // BATCH // SLICES
    assert compare(Script(Counting)).tensor("calls").tolist() == [float(steps)] * 16


def test_batches_without_samples() -> None:
    """A ``collate_fn`` that leaves all samples out. Their slice counts, with gradients of zeros."""

    def only_large(rows: Any) -> Any:
        kept = [row for row in rows if row[0][0] > 0]
        return [torch.stack(one) for one in zip(*kept, strict=True)] if kept else [torch.zeros(0, FEATURES), None]

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = plain(model.parameters(), lr=0.1)
        loader: Any = DataLoader(data, batch_size=BATCH, collate_fn=only_large)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for x, _ in loader:
            sizes.append(len(x))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    x = torch.randn(32, FEATURES, generator=generator(1))
    x[8:16, 0] = -1.0
    data, sizes = TensorDataset(x, torch.zeros(32)), list[int]()
    outcome, model = train(script, 1, 2, slices_per_step=2), Aligned()
    optimizer = plain(model.parameters(), lr=0.1)
    for start in (0, 16):
        optimizer.zero_grad()
        step = x[start : start + 16]
        (model(step[step[:, 0] > 0]).square().sum() / 2).backward()
        optimizer.step()
    assert 0 in sizes
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_one_worker_alone_computes_with_the_model_between_epochs() -> None:
    """DDP needs the module inside for this, since a forward pass in training mode waits for all processes."""
    seen: list[Tensor] = []

    def evaluate(ctx: Context, model: Any) -> None:
        if ctx.is_main:
            model.eval()
            with torch.no_grad():
                seen.append(model(DATA.tensors[0]).argmax(1))
            model.train()

    evaluated = train(Script(epoch=evaluate), 2, 2, slices_per_step=SLICES)
    assert len(seen) == EPOCHS
    assert evaluated.digests == train(Script(), 2, 2, slices_per_step=SLICES).digests


def test_the_whole_model_is_saved_and_copied() -> None:
    """By pickle, as ``torch.save(model)`` does, and by ``copy.deepcopy``. No name begins with ``module.``."""

    def look(ctx: Context, model: Any) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
            assert list(other.state_dict()) == ["first.weight", "first.bias", "second.weight"]
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(mine, theirs)
                assert mine.data_ptr() != theirs.data_ptr()

    train(Script(epoch=look))


def test_a_model_that_thaws_after_prepare() -> None:
    """DDP refuses a model in which nothing needs a gradient."""
    frozen = train(Script(lambda: Aligned().requires_grad_(False), prepared=lambda model: model.requires_grad_(True)))
    assert frozen.digests == train(Script()).digests
