"""The model of workers/charlm.py at a small size: its loss falls, and the number of workers does not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.cluster.harness import train
from tests.support.cluster.programs import Program, fill
from workers import charlm


def loss(scores: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def model() -> charlm.CharLM:
    made = charlm.CharLM(width=32, layers=2, heads=4, context=16)
    fill(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.1)
    return made


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95))


def test_the_loss_falls_and_one_worker_makes_the_bits_of_two() -> None:
    data = charlm.Windows(b"the cat sat on the mat, and the dog sat on the log. " * 12, 16)
    program = Program(data, 4, 6, model, optimizer, loss=loss, each=lambda ctx, _: ctx.clip_grad_norm(1.0))
    one, two = (train(program, workers, 2, slices_per_step=2) for workers in (1, 2))
    assert one.digests == two.digests
    trained = model()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(one.tensor(name))
    x, y = (torch.stack(parts) for parts in zip(*(data[i] for i in range(8)), strict=True))
    assert loss(trained(x), y) < 0.5 * loss(model()(x), y)
