"""A script that trains two models against each other, and the same with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paramserver.core.work.slices import DataSpec, SyncSchedule, schedule_of, slice_indices, slice_seed
from paramserver.worker.context import Context
from tests.support.cluster.programs import FEATURES, dataset, fill, generator

BATCH, EPOCHS, NOISE = 4, 2, 5

Each = Callable[[Context, str], object]
Make = Callable[[nn.Module, nn.Module], tuple[Any, Any]]


def models(norm: bool = True) -> tuple[nn.Module, nn.Module]:
    """A generator, and a critic that says how real samples are."""
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    forger = fill(nn.Sequential(nn.Linear(NOISE, 16), *middle, nn.Tanh(), nn.Linear(16, FEATURES)), 3)
    critic = fill(nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 1)), 4)
    return forger, critic


def optimizers(forger: nn.Module, critic: nn.Module) -> tuple[Any, Any]:
    """Adam with decay for both, with learning rates of their own, so that a step without a gradient would show."""
    one = torch.optim.AdamW(forger.parameters(), lr=0.003, weight_decay=0.1)
    return one, torch.optim.AdamW(critic.parameters(), lr=0.01, weight_decay=0.1)


def different_optimizers(forger: nn.Module, critic: nn.Module) -> tuple[Any, Any]:
    """Of two classes, with other state."""
    one = torch.optim.RMSprop(forger.parameters(), lr=0.003, momentum=0.5)
    return one, torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def critic_loss(forger: nn.Module, critic: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    """The critic is to tell real samples from forged ones."""
    with torch.no_grad():
        forged = forger(noise)
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    return F.binary_cross_entropy_with_logits(critic(real), ones) + F.binary_cross_entropy_with_logits(
        critic(forged), zeros
    )


def forger_loss(forger: nn.Module, critic: nn.Module, noise: Tensor) -> Tensor:
    """The forger is to deceive the critic."""
    return F.binary_cross_entropy_with_logits(critic(forger(noise)), torch.ones(len(noise), 1))


def noise_of(seed: int, samples: int) -> Tensor:
    """The noise of a batch."""
    return torch.randn(samples, NOISE, generator=generator(seed))


class Adversaries:
    """The training script. ``turns``: of the critic on each batch. ``each`` is called after each optimizer step."""

    def __init__(
        self, samples: int = 40, turns: int = 1, norm: bool = True, each: Each | None = None, make: Make = optimizers
    ) -> None:
        """``make``: the optimizers of forger and critic."""
        self.samples, self.turns, self.norm, self.each, self.make = samples, turns, norm, each, make
        self.states: list[dict[str, Any]] = []

    def __call__(self, ctx: Context) -> None:
        forger: Any
        critic: Any
        forger, critic = models(self.norm)
        of_forger, of_critic = self.make(forger, critic)
        x, _ = dataset(self.samples).tensors
        loader: Any = DataLoader(TensorDataset(x), batch_size=BATCH, shuffle=True)
        critic, of_critic = ctx.prepare(critic, of_critic, name="critic", turns=self.turns)
        forger, of_forger, loader = ctx.prepare(forger, of_forger, loader, name="forger")
        for _ in ctx.epochs(EPOCHS):
            for (real,) in loader:
                noise = noise_of(ctx.slice_seed("noise"), len(real))
                assert ctx.step_due
                for _ in range(self.turns):
                    of_critic.zero_grad()
                    critic_loss(forger, critic, real, noise).backward()  # type: ignore[no-untyped-call]
                    of_critic.step()
                    self._stepped(ctx, "critic")
                of_forger.zero_grad()
                forger_loss(forger, critic, noise).backward()  # type: ignore[no-untyped-call]
                assert ctx.step_due
                of_forger.step()
                self._stepped(ctx, "forger")
        self.states.append(ctx.state_dict())

    def _stepped(self, ctx: Context, name: str) -> None:
        if self.each is not None:
            self.each(ctx, name)


def data_of(samples: int, turns: int) -> tuple[DataSpec, Callable[[int], SyncSchedule]]:
    """The data of such a script, and its schedule for a number of slices in a step."""
    data = DataSpec(samples, BATCH, turns=turns + 1)
    return data, lambda slices: schedule_of(data, slices)


def with_plain_torch(
    samples: int, turns: int, slices: int, norm: bool = False, make: Make = optimizers
) -> tuple[Any, Any, Any, Any]:
    """The models and optimizers after the same training in one process: each step on ``slices`` batches."""
    forger, critic = models(norm)
    of_forger, of_critic = make(forger, critic)
    x, _ = dataset(samples).tensors
    data = DataSpec(samples, BATCH)
    for epoch in range(EPOCHS):
        for first in range(0, data.slices_per_epoch, slices):
            group = range(first, min(first + slices, data.slices_per_epoch))
            reals = [x[slice_indices(data, 0, epoch, index)] for index in group]
            noises = [
                noise_of(slice_seed(0, epoch, index, "noise"), len(real))
                for index, real in zip(group, reals, strict=True)
            ]
            total = sum(map(len, reals))
            for _ in range(turns):
                of_critic.zero_grad()
                for real, noise in zip(reals, noises, strict=True):
                    loss = critic_loss(forger, critic, real, noise) * (len(real) / total)
                    loss.backward()  # type: ignore[no-untyped-call]
                of_critic.step()
            of_forger.zero_grad()
            for noise in noises:
                (forger_loss(forger, critic, noise) * (len(noise) / total)).backward()  # type: ignore[no-untyped-call]
            of_forger.step()
    return forger, critic, of_forger, of_critic
