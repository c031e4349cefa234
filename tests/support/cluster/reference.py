"""What one process does with plain PyTorch, to compare with; the only code of ours is the cut into slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices

Batch = tuple[Tensor, Tensor]
Loss = Callable[..., Any]


def slices_of_steps(
    data: TensorDataset, batch_size: int, slices_per_step: int, epochs: int, seed: int = 0
) -> Iterator[list[Batch]]:
    """For each step of a synchronous job its slices, each as a batch."""
    spec = DataSpec(len(data), batch_size)
    schedule = SyncSchedule(spec.slices_per_epoch, slices_per_step)
    version = 0
    while (step := schedule.step(version)).epoch < epochs:
        batches = []
        for index in step.slices:
            x, y = data[slice_indices(spec, seed, step.epoch, index)]
            batches.append((x, y))
        yield batches
        version += 1


def whole_batches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[list[Batch]],
    loss: Loss,
    scheduler: LRScheduler | None = None,
) -> None:
    """As everybody trains: the mean loss over the global batch."""
    for batches in steps:
        optimizer.zero_grad()
        loss(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def slice_by_slice(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[list[Batch]],
    loss: Loss,
    scheduler: LRScheduler | None = None,
    backward: Callable[[Any, Tensor, Tensor], object] | None = None,
) -> None:
    """The gradient of each slice by itself, summed in the pairwise tree over the slices of the step.

    ``backward(model, x, y)`` makes the gradients of a slice; by default those of the loss.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for batches in steps:
        sums: list[list[Tensor | None]] = []
        for x, y in batches:
            optimizer.zero_grad()
            if backward is None:
                loss(model(x), y).backward()
            else:
                backward(model, x, y)
            sums.append([None if p.grad is None else p.grad * len(x) for p in parameters])
        samples = sum(len(x) for x, _ in batches)
        for parameter, total in zip(parameters, pairwise(sums), strict=True):
            parameter.grad = None if total is None else total / samples
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def pairwise(gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Neighbours are added level by level; what has no neighbour goes up as it is."""
    sums = [list(one) for one in gradients]
    while len(sums) > 1:
        pairs = [(sums[i], sums[i + 1]) for i in range(0, len(sums) - 1, 2)]
        rest = sums[-1:] if len(sums) % 2 else []
        sums = [[_add(a, b) for a, b in zip(left, right, strict=True)] for left, right in pairs] + rest
    return sums[0]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b
