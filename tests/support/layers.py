"""Layers and habits of models beyond plain ones: with shapes that fill vector registers where bits are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.cluster.programs import CLASSES, FEATURES, Aligned, fill, generator


class Checkpointed(Aligned):
    """Its first layer is computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.calls = reentrant, 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_() if self.reentrant else x
        return self.second(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Branching(Aligned):
    """Each slice takes one of two ways, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.full((16,), 0.5))
        self.right = nn.Parameter(torch.full((16,), 2.0))
        self.ways: set[bool] = set()

    def forward(self, x: Tensor) -> Any:
        way = bool(x[0, 0] > 0)
        self.ways.add(way)
        return super().forward(x) * (self.left if way else self.right).mean()


class Pictures(nn.Module):
    """A convolution over four channels, in either memory format."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)
        self.memory_format = memory_format
        fill(self)
        self.to(memory_format=memory_format)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        images = x.repeat(1, 8)[:, :16].view(-1, 4, 2, 2).contiguous(memory_format=self.memory_format)
        return self.head(torch.relu(self.conv(images)).mean((2, 3)))


class Quantised(nn.Module):
    """A linear layer whose weights are eight-bit numbers with a scale, and are not trained."""

    weight: Tensor
    scale: Tensor

    def __init__(self, inside_: int, outside: int) -> None:
        super().__init__()
        numbers = torch.randint(-9, 9, (outside, inside_), dtype=torch.int8, generator=generator(3))
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", torch.full((outside, 1), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.scale).T


class Adapted(nn.Module):
    """A quantised layer and an adapter of low rank, as in QLoRA; the head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Quantised(FEATURES, 16)
        self.down = nn.Linear(FEATURES, 16, bias=False)
        self.up = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, CLASSES)
        fill(self)  # workers of a test are threads, and all draw from torch's own generator
        nn.init.zeros_(self.up.weight)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


def adapters(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01, **options)
