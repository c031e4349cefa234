"""What scripts for DistributedDataParallel expect, by its documentation and its tests, and what becomes of it here.

docs/migration.md has a row for each test.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.prune import l1_unstructured
from torch.utils.data import DataLoader, TensorDataset

from paramserver import errors
from paramserver.worker.context import Context
from paramserver.worker.gradients import early
from tests.support.cluster.harness import Outcome, inside, train
from tests.support.cluster.programs import CLASSES, FEATURES, Aligned, adamw, dataset, fill, generator, plain
from tests.support.cluster.reference import slice_by_slice, slices_of_steps

SAMPLES, BATCH, SLICES, EPOCHS = 48, 8, 2, 2
DATA = dataset(SAMPLES)
Build = Callable[[], nn.Module]
Backward = Callable[[Any, Tensor, Tensor], object]
cross_entropy: Any = F.cross_entropy


def of_the_loss(model: Any, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y).backward()


class Script:
    """Trains, with the gradients that ``backward`` makes. ``prepared`` and ``epoch`` are called with each model."""

    def __init__(
        self,
        build: Build = Aligned,
        backward: Backward = of_the_loss,
        prepared: Callable[[Any], object] = lambda model: None,
        epoch: Callable[[Context, Any], object] = lambda ctx, model: None,
    ) -> None:
        self.build, self.backward, self.prepared, self.epoch = build, backward, prepared, epoch

    def __call__(self, ctx: Context) -> None:
        model: Any = self.build()
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(DATA, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        self.prepared(model)
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                self.backward(model, x, y)
                optimizer.step()
            self.epoch(ctx, model)


def compare(script: Script, exact: bool = True) -> Outcome:
    """Two workers and two servers have the bits of plain torch (``exact``), or are close to it."""
    outcome = train(script, 2, 2, slices_per_step=SLICES)
    model = script.build()
    script.prepared(model)
    optimizer = adamw(model.parameters(), fused=True)
    steps = slices_of_steps(DATA, BATCH, SLICES, EPOCHS)
    slice_by_slice(model, optimizer, steps, cross_entropy, backward=script.backward)
    for name, parameter in model.named_parameters():
        found, expected = outcome.tensor(name), parameter.detach()
        if exact:
            assert torch.equal(found, expected), name
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    return outcome


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


# ---- what differs


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    told = capsys.readouterr()
    return [line for line in (told.out + told.err).splitlines() if "warning" in line]


def test_first_weights_that_differ_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """As where only rank 0 loads a checkpoint. All workers begin with its weights."""
    begun: dict[int, Tensor] = {}

    def script(ctx: Context) -> None:
        model = Aligned()
        if ctx.is_main:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        ctx.prepare(model, adamw(model.parameters()))
        begun[ctx.rank] = model.first.weight.detach().clone()

    train(script, 2, 2)
    assert torch.equal(begun[0], begun[1])
    assert torch.equal(begun[0], Aligned().first.weight + 1), "those that the main worker has loaded"
    (warning,) = said(capsys)
    assert "begins with the weights of the main worker, and not with this worker's, which differ in 'first." in warning
    train(Script(), 2, 2)
    assert said(capsys) == []


def another_layer(model: Any) -> None:
    model.second = nn.Linear(48, CLASSES, bias=False)


@pytest.mark.parametrize("again", [False, True], ids=["after prepare", "between epochs"])
def test_a_layer_that_is_replaced_is_refused(again: bool) -> None:
    """DDP goes on without the new layer's gradients."""
    script = Script(epoch=lambda _, model: another_layer(model)) if again else Script(prepared=another_layer)
    with pytest.raises(
        errors.UserError, match=r"another parameter 'second\.weight' than at ctx\.prepare, which nobody"
    ):
        train(script)


class Square(nn.Module):
    """Two layers that may be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second = nn.Linear(FEATURES, FEATURES, bias=False)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))[:, :CLASSES]


def test_a_layer_that_is_tied_after_prepare_is_trained() -> None:
    """The place of its parameter has one that is trained."""

    def tie(model: Any) -> None:
        model.second.weight = model.first.weight

    outcome = train(Script(Square, prepared=tie))
    assert torch.equal(outcome.tensor("second.weight"), Square().second.weight), "without a gradient"
    assert not torch.equal(outcome.tensor("first.weight"), Square().first.weight)


def test_a_pruned_layer_keeps_its_parameter() -> None:
    """The parameter has another name then, and is trained."""

    def prune(model: Any) -> None:
        l1_unstructured(model.second, "weight", 0.5)  # type: ignore[no-untyped-call]

    outcome = train(Script(prepared=prune))
    assert not torch.equal(outcome.tensor("second.weight"), Aligned().second.weight)


def test_an_optimizer_in_the_backward_pass_is_refused() -> None:
    def register(model: Any) -> None:
        optimizer = torch.optim.SGD([model.first.weight], lr=0.1)
        model.first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    with pytest.raises(errors.UserError, match=r"has changed the parameter 'first\.weight' itself"):
        train(Script(prepared=register))


def test_parameters_of_each_process_are_refused() -> None:
    """A name of a frozen parameter does no harm."""

    def work(ctx: Context) -> None:
        model: Any = Aligned()
        model._ddp_params_and_buffers_to_ignore = ["first.bias", "second.weight"]
        with pytest.raises(errors.ModelError, match=r"the model names 'first\.bias' in _ddp_params_and_buffers_to_ign"):
            ctx.prepare(model, adamw(model.parameters()))
        ctx.prepare(model, adamw([model.first.weight]))

    inside(work)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_averaging_of_models_is_refused() -> None:
    from torch.distributed.optim import PostLocalSGDOptimizer

    def work(ctx: Context) -> None:
        model, averager = Aligned(), object()
        optimizer = PostLocalSGDOptimizer(adamw(model.parameters()), averager)  # type: ignore[arg-type]
        with pytest.raises(errors.ModelError, match="PostLocalSGDOptimizer is not supported; supported: SGD, Adam"):
            ctx.prepare(model, optimizer)

    inside(work)


def test_a_state_dict_of_ddp_is_refused_with_its_prefix() -> None:
    def work(ctx: Context) -> None:
        model: Any = Aligned()
        model, _ = ctx.prepare(model, adamw(model.parameters()))
        saved = {f"module.{name}": value + 1 for name, value in model.state_dict().items()}
        with pytest.raises(errors.ModelError, match=r"without the 'module\.' of DistributedDataParallel before each"):
            ctx.load(model=saved)
        nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
        ctx.load(model=saved)
        assert torch.equal(model.first.weight, saved["first.weight"])

    inside(work)
