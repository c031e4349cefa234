"""Rows about learning-rate schedulers and optimizers of torch that servers run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import lr_scheduler as torchs

from benchmarks.parity.rows import DDP, PLAIN, Row
from benchmarks.parity.training import EPOCHS, STEPS_PER_EPOCH, Training, sgd
from tests.support.optimizers import OPTIMIZERS, model_for

STEPS = EPOCHS * STEPS_PER_EPOCH
WITH_SGD = Training(optimizer=sgd)

# By torch's name; each is stepped after every optimizer step.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: torchs.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 9], 0.3),
    "ConstantLR": lambda o: torchs.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: torchs.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, STEPS, 2.0),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=STEPS),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=4), torchs.CosineAnnealingLR(o, STEPS - 4)], [4]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.5, 4), torchs.ExponentialLR(o, 0.9)]),
}


def plateau(optimizer: Any) -> Any:
    """Falls after each epoch, since no loss is as much better as it asks."""
    return torchs.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.9)


def of_optimizer(name: str) -> Training:
    """Trains with an optimizer that servers run."""
    return Training(model=lambda: model_for(name), optimizer=OPTIMIZERS[name])


def title(name: str) -> str:
    """The name of an optimizer in torch, and the special feature of this row."""
    first, _, flag = name.partition("-")
    kind = type(OPTIMIZERS[name](model_for(name).parameters())).__name__
    assert kind.lower() == first, name
    return f"`{kind}`" + (f", `{flag}`" if flag else "")


OF_OPTIMIZERS = [
    *(Row(title(name), PLAIN, of_optimizer(name)) for name in OPTIMIZERS),
    *(Row(title(name), DDP, of_optimizer(name)) for name in ("sgd", "adamw", "muon")),
    Row("`maximize`", PLAIN, Training(optimizer=lambda p: torch.optim.SGD(p, lr=0.01, maximize=True, fused=True))),
]
OF_SCHEDULERS = [
    *(Row(f"`{name}`", PLAIN, replace(WITH_SGD, scheduler=make)) for name, make in SCHEDULERS.items()),
    Row(
        "`OneCycleLR`, made before `prepare`", PLAIN, replace(WITH_SGD, scheduler=SCHEDULERS["OneCycleLR"], early=True)
    ),
    Row("`StepLR`, once for each epoch", PLAIN, replace(WITH_SGD, scheduler=SCHEDULERS["StepLR"], per_epoch=True)),
    Row("`ReduceLROnPlateau`", PLAIN, replace(WITH_SGD, scheduler=plateau, per_epoch=True, epochs=4)),
    Row("`OneCycleLR`", DDP, replace(WITH_SGD, scheduler=SCHEDULERS["OneCycleLR"])),
]
