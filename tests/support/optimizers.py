"""Every optimizer that servers run, as a script makes it, and a model that it can train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.cluster.programs import CLASSES, FEATURES, Aligned, fill

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

# Fused where torch has that, as servers use it: only then are the bits the same.
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2, weight_decay=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.01),
    "adafactor-maximize": lambda p: torch.optim.Adafactor(p, lr=0.05, maximize=True, eps=(1e-8, 1e-3)),
    "muon": lambda p: torch.optim.Muon(p, lr=0.02, adjust_lr_fn="match_rms_adamw"),
}


class Matrices(nn.Module):
    """Every parameter has two dimensions, as Muon needs it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 48, bias=False, dtype=dtype)
        self.second = nn.Linear(48, CLASSES, bias=False, dtype=dtype)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


def model_for(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model that this optimizer can train."""
    return Matrices(dtype) if name == "muon" else Aligned(dtype)
