"""Rows about several models in one job, which step in turn on each batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from benchmarks.parity.rows import DDP, PLAIN, Row, Tensors
from benchmarks.parity.sides import Data, Side
from benchmarks.parity.training import EPOCHS, SAMPLES, flat
from tests.support.cluster.programs import FEATURES, dataset, fill, generator
from tests.support.turns.pair import Mixed, optimizers_of, schedulers_of

# Real samples, and the noise of which forged ones are made.
PAIRS = Data(TensorDataset(dataset(SAMPLES).tensors[0], torch.randn(SAMPLES, 16, generator=generator(5))))


def forging() -> nn.Module:
    """Makes samples of noise."""
    return fill(nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, FEATURES, bias=False)))


def judging() -> nn.Module:
    """Gives real samples a high score."""
    return fill(nn.Sequential(nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 1, bias=False)), 3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With decay, so that a step of the other model would show."""
    return torch.optim.AdamW(parameters, lr=0.003, weight_decay=0.1, fused=True)


def faster(parameters: Any) -> torch.optim.Optimizer:
    """The same class, with other numbers."""
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.5, 0.9), weight_decay=0.1, fused=True)


@dataclass(frozen=True, slots=True)
class Adversaries:
    """A forger and a critic; ``turns`` of the critic on each batch. ``scheduled``: rates fall after each batch."""

    of_critic: Callable[[Any], torch.optim.Optimizer] = faster
    of_forger: Callable[[Any], torch.optim.Optimizer] = adamw
    turns: int = 1
    scheduled: bool = False

    def __call__(self, side: Side) -> Tensors:
        forger: Any = forging()
        critic: Any = judging()
        critic, of_critic = side.prepare_part("critic", critic, self.of_critic(critic.parameters()), self.turns)
        forger, of_forger = side.prepare_part("forger", forger, self.of_forger(forger.parameters()))
        loader = side.prepare_data(PAIRS)
        schedulers = [side.scheduler(StepLR(one, 3)) for one in (of_critic, of_forger) if self.scheduled]
        for _ in side.epochs(EPOCHS):
            for real, noise in loader:
                for _ in range(self.turns):
                    of_critic.zero_grad()
                    with torch.no_grad():
                        forged = forger(noise)
                    (softplus(-critic(real)) + softplus(critic(forged))).mean().backward()  # type: ignore[no-untyped-call]
                    of_critic.step()
                of_forger.zero_grad()
                softplus(-critic(forger(noise))).mean().backward()  # type: ignore[no-untyped-call]
                of_forger.step()
                for scheduler in schedulers:
                    scheduler.step()
        return flat(side.state())


class Policy(nn.Module):
    """Scores of actions."""

    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 48), nn.Linear(48, outputs, bias=False)
        fill(self, seed)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)))


def actor_and_critic(side: Side) -> Tensors:
    """The actor learns from the advantage that the critic sees, and steps first."""
    actor, critic = Policy(4, 6), Policy(1, 7)
    learns, of_actor = side.prepare_part("actor", actor, adamw(actor.parameters()))
    judges, of_critic = side.prepare_part("critic", critic, faster(critic.parameters()))
    loader = side.prepare_data(Data(dataset(SAMPLES)))
    for _ in side.epochs(EPOCHS):
        for x, y in loader:
            value = judges(x).squeeze(1)
            advantage = y.float() - value
            of_actor.zero_grad()
            chosen = learns(x).log_softmax(1).gather(1, y[:, None]).squeeze(1)
            (-chosen * advantage.detach()).mean().backward()
            of_actor.step()
            of_critic.zero_grad()
            (y.float() - judges(x).squeeze(1)).square().mean().backward()
            of_critic.step()
    return flat(side.state())


def draws(side: Side) -> Tensors:
    """The script draws its batches, in a loop over numbers."""
    forger: Any = forging()
    critic: Any = judging()
    critic, of_critic = side.prepare_part("critic", critic, faster(critic.parameters()))
    forger, of_forger = side.prepare_part("forger", forger, adamw(forger.parameters()))
    loader = side.prepare_data(Data(TensorDataset(torch.arange(20), torch.arange(20)), batch_size=1))
    samples, _ = dataset(SAMPLES).tensors
    for _ in side.epochs(1):
        for number, _ in loader:
            numbers = generator(int(number))
            real = samples[torch.randint(SAMPLES, (6,), generator=numbers)]
            noise = torch.randn(6, 16, generator=numbers)
            of_critic.zero_grad()
            (softplus(-critic(real)) + softplus(critic(forger(noise).detach()))).mean().backward()  # type: ignore[no-untyped-call]
            of_critic.step()
            of_forger.zero_grad()
            softplus(-critic(forger(noise))).mean().backward()  # type: ignore[no-untyped-call]
            of_forger.step()
    return flat(side.state())


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """Another class, with other state."""
    return torch.optim.RMSprop(parameters, lr=0.003, momentum=0.5)


def two_optimizers(side: Side) -> Tensors:
    """Muon for matrices, AdamW for the rest of one model, each with a scheduler."""
    model: Any = Mixed()
    given = optimizers_of(model)
    made = schedulers_of(*given)
    model, optimizers, loader = side.prepare_several(model, given, Data(dataset(SAMPLES)))
    schedulers = [side.scheduler(one) for one in made]
    for _ in side.epochs(EPOCHS):
        for x, y in loader:
            side.weighed(cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            if side.due:
                for one in (*optimizers, *schedulers):
                    one.step()
                model.zero_grad()
    return flat(side.state())


EQUAL, OFTEN = Adversaries(), Adversaries(turns=3)
# In a step of one slice, and with DDP in a step of two.
ROWS = [
    Row("Two models with optimizers that step in turn", PLAIN, EQUAL, slices=1),
    Row("Two models with optimizers that step in turn", DDP, EQUAL),
    Row("One model steps three times for each step of the other", PLAIN, OFTEN, slices=1),
    Row("One model steps three times for each step of the other", DDP, OFTEN),
    Row("Two models, each with a scheduler", PLAIN, Adversaries(scheduled=True), slices=1),
    Row("Two models with optimizers of different classes", PLAIN, Adversaries(of_forger=rmsprop), slices=1),
    Row("Two models with optimizers of different classes", DDP, Adversaries(of_forger=rmsprop)),
    Row("One model with two optimizers: `Muon` for matrices, `AdamW` for the rest", PLAIN, two_optimizers),
    Row("One model with two optimizers: `Muon` for matrices, `AdamW` for the rest", DDP, two_optimizers),
    Row("An actor and a critic, with losses of each other's outputs", PLAIN, actor_and_critic, slices=1),
    Row("An actor and a critic, with losses of each other's outputs", DDP, actor_and_critic),
    Row("Two models, and batches that the script draws: a loader over `range(steps)`", DDP, draws),
]
