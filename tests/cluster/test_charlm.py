"""The model of workers/charlm.py at a small size: its loss falls, and the number of workers does not show."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, item_of, train
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


DATA = charlm.Windows(b"the cat sat on the mat, and the dog sat on the log. " * 12, 16)
EPOCHS, SLICES = 4, 4


def curve(workers: int) -> tuple[tuple[str, str, str], dict[tuple[int, int], float], Outcome]:
    """The digests of a job, the loss of each slice by epoch and index, and the job."""
    losses: dict[tuple[int, int], float] = {}

    def measured(scores: Tensor, y: Tensor) -> Tensor:
        found = loss(scores, y)
        kept.value = found.item()
        return found

    def each(ctx: Context, _: int) -> None:
        item = item_of(ctx)
        losses[item.epoch, item.index] = kept.value
        ctx.clip_grad_norm(1.0)

    kept = threading.local()  # workers are threads
    program = Program(DATA, 4, EPOCHS, model, optimizer, loss=measured, each=each)
    outcome = train(program, workers, 2, slices_per_step=SLICES)
    return outcome.digests, losses, outcome


def test_the_loss_falls_on_the_same_curve_with_1_2_and_4_workers() -> None:
    digests, losses, one = curve(1)
    assert len(losses) == EPOCHS * -(-len(DATA) // 4)
    for workers in (2, 4):
        assert curve(workers)[:2] == (digests, losses)
    trained = model()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(one.tensor(name))
    x, y = (torch.stack(parts) for parts in zip(*(DATA[i] for i in range(8)), strict=True))
    assert loss(trained(x), y) < 0.85 * loss(model()(x), y)
