"""Habits of scripts for DistributedDataParallel that mean something else here: each is refused, or a message says it.

docs/migration.md has a row for each test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import inside, train
from tests.support.cluster.programs import CLASSES, FEATURES, Aligned, adamw, fill
from tests.support.pieces.as_ddp import Script


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
