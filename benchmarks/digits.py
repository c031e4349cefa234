"""A real model on real data: wide layers and the handwritten digits that scikit-learn ships."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

RATE, MOMENTUM = 0.02, 0.9


def digits() -> TensorDataset:
    """All of them, flat."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels, dtype=torch.int64))


def network(hidden: int) -> nn.Sequential:
    """64 pixels in, 10 scores out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
