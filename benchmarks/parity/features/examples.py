"""Rows about the training scripts of this repository, at a small size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.parity.rows import DDP, ROUNDING, Row
from benchmarks.parity.sides import Data
from benchmarks.parity.training import Training
from tests.support.cluster.programs import fill
from workers import charlm

TEXT = b"the cat sat on the mat, and the dog sat on the log. " * 40
CONTEXT, STEPS = 16, 32


def pieces() -> TensorDataset:
    """128 pieces of a text: 32 batches of 4."""
    windows = charlm.Windows(TEXT, CONTEXT)
    x, y = zip(*(windows[index] for index in range(128)), strict=True)
    return TensorDataset(torch.stack(x), torch.stack(y))


def small() -> nn.Module:
    """A model of 27,000 parameters."""
    model = fill(charlm.CharLM(width=32, layers=2, heads=4, context=CONTEXT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
    return model


def with_groups(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices only."""
    return torch.optim.AdamW(charlm.groups(parameters, 0.1), lr=0.01, betas=(0.9, 0.95), fused=True)


def loss(scores: Tensor, y: Tensor) -> Tensor:
    """The mean for each byte."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def schedule(optimizer: Any) -> Any:
    """Warm-up and cosine."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, charlm.warm_up_and_cosine(4, STEPS))


SMALL = Training(small, with_groups, Data(pieces()), scheduler=schedule, clip=1.0, loss=loss)
ROWS = [Row("`workers/charlm.py`: a tied head, groups, warm-up and cosine, clipping", DDP, SMALL, ROUNDING)]
