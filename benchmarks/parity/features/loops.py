"""Rows about the training loop: accumulation, clipping, precision, data, behaviour of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from benchmarks.parity.rows import DDP, PLAIN, ROUNDING, Row, Tensors
from benchmarks.parity.sides import Data, Side
from benchmarks.parity.training import DATA, EPOCHS, Training, adamw
from tests.support.cluster.programs import CLASSES, FEATURES, Aligned, dataset, fill

WHOLE = Training()
# 20 batches. With four batches in a slice an epoch ends with a step of two slices of two batches.
UNEVEN = Data(dataset(80), accumulate=4)


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Partly(Aligned):
    """``rare`` takes part where a batch has a large first feature, ``never`` in no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(16))
        self.never = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores * self.rare.mean() if bool((x[:, 0] > 1.5).any()) else scores


class Normed(Aligned):
    """With BatchNorm behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.norm(self.first(x))))


class Scores(nn.Linear):
    """Scores without a bound."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 16, bias=False)
        fill(self)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices only; the second group is added."""
    given = list(parameters)
    matrices = {"params": [p for p in given if p.dim() > 1], "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([matrices], lr=0.01, fused=True)
    optimizer.add_param_group({"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05})
    return optimizer


def thaws(model: nn.Module, epoch: int) -> None:
    """The first layer trains from the second epoch on."""
    for name, parameter in model.named_parameters():
        if "first" in name:
            parameter.requires_grad_(epoch > 0)


def by_length(epoch: int) -> list[int]:
    """Samples of similar size stand together; another group comes first in each epoch. Some come twice."""
    order = sorted(range(60), key=lambda index: index * 7 % 11)
    return [*order[20 * epoch :], *order[: 20 * epoch], 5, 5, 7, 7]


SAMPLED = Data(dataset(60), order=by_length)
STREAMED = replace(SAMPLED, stream=True)


def compiled() -> nn.Module:
    """With a backend that translates nothing, so that it is quick."""
    model: nn.Module = torch.compile(Aligned(), backend="eager")  # type: ignore[assignment]
    return model


def with_overflow() -> Data:
    """A sample of the sixth batch has a feature that is infinite."""
    x, y = dataset(64).tensors
    x[22, 0] = torch.inf
    return Data(TensorDataset(x, y))


def ema(side: Side) -> Tensors:
    """An AveragedModel that is updated once for each version."""
    model: Any = Aligned()
    optimizer: Any = adamw(model.parameters())
    model, optimizer, loader = side.prepare(model, optimizer, DATA)
    mean: Any = AveragedModel(getattr(model, "module", model))
    for _ in side.epochs(EPOCHS):
        for x, y in loader:
            side.weighed(nn.functional.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            if side.due:
                optimizer.step()
                optimizer.zero_grad()
                if side.stepped():
                    mean.update_parameters(getattr(model, "module", model))
    return dict(mean.state_dict())


def scaled(side: Side) -> Tensors:
    """``training.lr_scaling = "linear"``: a learning rate for one slice, in steps of two slices."""
    rate = 0.05 if side.ours else 0.1
    return Training(optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9, fused=True))(side)


def scaled_by_root(side: Side) -> Tensors:
    """``training.lr_scaling = "sqrt"``."""
    rate = 0.05 if side.ours else 0.05 * 2.0**0.5
    return Training(optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9, fused=True))(side)


LINEAR = {"training.lr_scaling": "linear", "training.lr_base_slices": 1}
ROOT = {"training.lr_scaling": "sqrt", "training.lr_base_slices": 1}
PLAIN_SGD = Training(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, fused=True))

ROWS = [
    Row("A plain loop, data in order", PLAIN, WHOLE),
    Row("A plain loop, data in order", DDP, WHOLE),
    Row("Shuffled data, in the order of the job", DDP, replace(WHOLE, data=replace(DATA, shuffle=True))),
    Row("`drop_last`", PLAIN, replace(WHOLE, data=Data(dataset(62), drop_last=True))),
    Row("The last slice of an epoch is short", PLAIN, replace(WHOLE, data=Data(dataset(63))), ROUNDING),
    Row(
        "Uneven inputs: the last step has one slice",
        DDP,
        replace(PLAIN_SGD, data=Data(dataset(60))),
        ddp={"join": True},
    ),
    Row("Accumulation of 4 batches, `no_sync`, a shorter last group", PLAIN, replace(WHOLE, data=UNEVEN), ROUNDING),
    Row("Accumulation of 4 batches, `no_sync`, a shorter last group", DDP, replace(WHOLE, data=UNEVEN), ROUNDING),
    Row("Accumulation with clipping of all slices", DDP, replace(WHOLE, data=UNEVEN, clip=0.1), ROUNDING),
    Row("Accumulation with GradScaler and clipping", DDP, replace(WHOLE, data=UNEVEN, clip=0.1, scaler=True), ROUNDING),
    Row("Clipping of the step's gradient", PLAIN, replace(WHOLE, clip=0.1), ROUNDING),
    Row("Clipping of the step's gradient", DDP, replace(WHOLE, clip=0.1), ROUNDING),
    Row("GradScaler", DDP, replace(WHOLE, scaler=True)),
    Row(
        "GradScaler, one slice overflows: the step is left out",
        DDP,
        replace(WHOLE, model=Scores, data=with_overflow(), scaler=True),
    ),
    Row("bf16 autocast", DDP, replace(WHOLE, bf16=True)),
    Row("bf16 autocast", PLAIN, replace(WHOLE, bf16=True)),
    Row("A sampler of the script's, another order in each epoch", DDP, replace(WHOLE, data=SAMPLED)),
    Row("A sampler of the script's, another order in each epoch", PLAIN, replace(WHOLE, data=SAMPLED)),
    Row("An `IterableDataset`", DDP, replace(WHOLE, data=STREAMED)),
    Row("An `IterableDataset`", PLAIN, replace(WHOLE, data=STREAMED)),
    Row("`torch.compile`", PLAIN, replace(WHOLE, model=compiled)),
    Row("Weight tying", DDP, replace(WHOLE, model=Tied)),
    Row(
        "Parameters that some or all slices do not use",
        DDP,
        replace(WHOLE, model=Partly),
        ddp={"find_unused_parameters": True},
    ),
    Row("Parameter groups, one of them added by `add_param_group`", DDP, replace(WHOLE, optimizer=grouped)),
    Row("A layer that is frozen in the first epoch", PLAIN, replace(WHOLE, each=thaws)),
    Row("BatchNorm and its buffers, one slice in a step", PLAIN, replace(WHOLE, model=Normed), ROUNDING, slices=1),
    Row("`AveragedModel`", PLAIN, ema, workers=(1,)),
    Row('`training.lr_scaling = "linear"`', PLAIN, scaled, settings=LINEAR),
    Row('`training.lr_scaling = "sqrt"`', PLAIN, scaled_by_root, ROUNDING, settings=ROOT),
]
