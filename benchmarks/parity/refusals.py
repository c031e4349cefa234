"""Refusals: functions that provoke them, each in a job of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.parity.rows import Refusal
from benchmarks.parity.training import DATA, adamw
from paramserver.worker.context import Context
from tests.support.cluster.programs import Aligned

Script = Callable[[Context, Any, Any, Any], object]


class Stream(IterableDataset[Tensor]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


class Own(torch.optim.SGD):
    """An optimizer of the script, which no server can import."""


def wrapped() -> nn.Module:
    """DDP around a model, without the process group that DDP needs."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = Aligned()
    return model


def sparse(**options: Any) -> Callable[[], nn.Module]:
    """An embedding with these options."""
    return lambda: nn.Embedding(5, 4, **options)


def model_and(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Context], object]:
    """``prepare`` with this optimizer."""

    def provoke(ctx: Context) -> None:
        model = Aligned()
        ctx.prepare(model, optimizer(model.parameters()))

    return provoke


def of_model(make: Callable[[], nn.Module]) -> Callable[[Context], object]:
    """``prepare`` with this model."""

    def provoke(ctx: Context) -> None:
        model = make()
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return provoke


def after_prepare(script: Script) -> Callable[[Context], object]:
    """A script's use of a prepared model, optimizer and loader."""

    def provoke(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(DATA.samples, DATA.batch_size)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        script(ctx, model, optimizer, loader)

    return provoke


def train(model: Any, optimizer: Any, loader: Any) -> None:
    """An epoch."""
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def without_a_step(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """A script that accumulates gradients without ``accumulate``."""
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


def writes(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """A script that clamps the weights in its loop."""
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            model.first.weight.clamp_(-0.1, 0.1)
        optimizer.step()


def twice_in_an_epoch(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """Two loops over the loader in an epoch of ``ctx.epochs``."""
    for _ in ctx.epochs(2):
        train(model, optimizer, loader)
        train(model, optimizer, loader)


def other_state(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """State of another training."""
    plain = Aligned()
    other = adamw(plain.parameters())
    plain(DATA.samples.tensors[0]).sum().backward()
    other.step()
    optimizer.load_state_dict(other.state_dict())


def two_models(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """A second model."""
    second = Aligned()
    ctx.prepare(second, adamw(second.parameters()))


def of_another_optimizer(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """A scheduler of another optimizer than the trained one."""
    ctx.prepare(StepLR(adamw(Aligned().parameters()), 3))


def within_the_loop(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    """A scheduler that counts the slices of its worker."""
    scheduler = StepLR(optimizer, 1)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def adversaries(script: Callable[[Context, Any, Any, Any, Any], object]) -> Callable[[Context], object]:
    """A script's use of two models and their optimizers, before the loader."""

    def provoke(ctx: Context) -> None:
        critic, forger = Aligned(), Aligned()
        script(ctx, critic, adamw(critic.parameters()), forger, adamw(forger.parameters()))

    return provoke


def without_a_loader(ctx: Context, critic: Any, of_critic: Any, forger: Any, of_forger: Any) -> None:
    """A loop in which the script draws its batches."""
    critic, of_critic = ctx.prepare(critic, of_critic, name="critic")
    forger, of_forger = ctx.prepare(forger, of_forger, name="forger")
    critic(torch.ones(3, 8)).sum().backward()
    of_critic.step()


def shared_trunk(ctx: Context, actor: Any, of_actor: Any, critic: Any, of_critic: Any) -> None:
    """Two heads on one trunk, as two models."""
    critic.first = actor.first
    ctx.prepare(actor, of_actor, name="actor")
    ctx.prepare(critic, adamw(critic.parameters()), name="critic")


def now_and_then(ctx: Context, critic: Any, of_critic: Any, forger: Any, of_forger: Any) -> None:
    """The forger steps on every fifth batch."""
    loader: Any = DataLoader(DATA.samples, DATA.batch_size)
    critic, of_critic = ctx.prepare(critic, of_critic, name="critic")
    forger, of_forger, loader = ctx.prepare(forger, of_forger, loader, name="forger")
    for number, _ in enumerate(loader):
        of_critic.step()
        if number % 5 == 0:
            of_forger.step()


REFUSED = [
    Refusal("`LBFGS`", model_and(lambda p: torch.optim.LBFGS(p))),
    Refusal("`SparseAdam`", model_and(lambda p: torch.optim.SparseAdam(list(p)))),
    Refusal("an optimizer of the script's that is not declared", model_and(lambda p: Own(p, lr=0.1))),
    Refusal("`differentiable=True`", model_and(lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True))),
    Refusal("an optimizer of another model", model_and(lambda p: adamw(Aligned().parameters()))),
    Refusal("`DistributedDataParallel`", of_model(wrapped)),
    Refusal("`DataParallel`", of_model(lambda: nn.DataParallel(Aligned()))),
    Refusal("an embedding with `sparse=True`", of_model(sparse(sparse=True))),
    Refusal("an embedding with `max_norm`", of_model(sparse(max_norm=1.0))),
    Refusal("a model on the `meta` device", of_model(lambda: nn.Linear(3, 3, device="meta"))),
    Refusal("a lazy layer", of_model(lambda: nn.LazyLinear(3))),
    Refusal("complex parameters", of_model(lambda: nn.Linear(3, 3, dtype=torch.complex64))),
    Refusal("an `IterableDataset` without a length", lambda ctx: ctx.prepare(DataLoader(Stream()))),
    Refusal("an empty data set", lambda ctx: ctx.prepare(DataLoader([]))),  # type: ignore[arg-type]
    Refusal("a second model", after_prepare(two_models)),
    Refusal(
        "`add_param_group` after `prepare`",
        after_prepare(lambda ctx, model, optimizer, loader: optimizer.add_param_group({"params": []})),
    ),
    Refusal("`optimizer.load_state_dict` of other state after `prepare`", after_prepare(other_state)),
    Refusal("weights that the script writes in its loop", after_prepare(writes)),
    Refusal("gradients without `optimizer.step()`", after_prepare(without_a_step)),
    Refusal("a second loop over the loader in an epoch of `ctx.epochs`", after_prepare(twice_in_an_epoch)),
    Refusal("a scheduler of another optimizer", after_prepare(of_another_optimizer)),
    Refusal("a scheduler that was not prepared", after_prepare(within_the_loop)),
    Refusal("several models, and a loop without a loader", adversaries(without_a_loader)),
    Refusal("two models that share a layer", adversaries(shared_trunk)),
    Refusal("several models of which one steps on some batches only", adversaries(now_and_then)),
]
