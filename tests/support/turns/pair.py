"""A script whose model has two optimizers: Muon for its matrices, and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from paramserver.core.work.slices import DataSpec, slice_indices
from paramserver.worker.context import Context
from tests.support.cluster.programs import CLASSES, FEATURES, dataset, fill
from tests.support.cluster.reference import pairwise

SAMPLES, BATCH, EPOCHS = 128, 8, 3


class Mixed(nn.Module):
    """Matrices and vectors in turn, as in real models. Every tensor fills whole vector registers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 48)
        self.norm = nn.LayerNorm(48)
        self.second = nn.Linear(48, 32, bias=False)
        self.head = nn.Linear(32, CLASSES, bias=False)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon trains."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("head")]


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon, and AdamW with two groups."""
    mine = {id(p) for p in matrices(model)}
    others = [p for p in model.parameters() if id(p) not in mine]
    muon = torch.optim.Muon(matrices(model), lr=0.02, adjust_lr_fn="match_rms_adamw")
    decayed: dict[str, Any] = {"params": [p for p in others if p.ndim > 1], "weight_decay": 0.1}
    rest: dict[str, Any] = {"params": [p for p in others if p.ndim < 2]}
    return muon, torch.optim.AdamW([decayed, rest], lr=0.01, fused=True)


def schedulers_of(muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> tuple[LRScheduler, LRScheduler]:
    """One for each optimizer."""
    return CosineAnnealingLR(muon, T_max=20), StepLR(adamw, step_size=4, gamma=0.5)


def fall(optimizer: torch.optim.Optimizer) -> None:
    """By hand: the learning rate of the next step is smaller."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


class Pair:
    """The script. ``each`` is called before the first optimizer's step, with the number of this worker's slices."""

    def __init__(
        self,
        each: Callable[[Context, int], object] | None = None,
        scheduled: bool = True,
        clear: bool = False,
        pairwise: bool = False,
    ) -> None:
        """``clear``: each optimizer clears its gradients after its step. ``pairwise``: then its scheduler steps.

        Without schedulers the learning rate of each optimizer falls by hand after its step.
        """
        self.each, self.scheduled, self.clear, self.pairwise = each, scheduled, clear, pairwise
        self.states: list[dict[str, Any]] = []

    def __call__(self, ctx: Context) -> None:
        model: Any = Mixed()
        given = optimizers_of(model)
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
        schedulers: tuple[Any, ...] = schedulers_of(*given) if self.scheduled else ()
        model, muon, loader, adamw, *schedulers_made = ctx.prepare(model, given[0], loader, given[1], *schedulers)
        slices = 0
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if self.each is not None:
                    self.each(ctx, slices)
                for number, optimizer in enumerate((muon, adamw)):
                    optimizer.step()
                    if self.clear:
                        optimizer.zero_grad()
                    if self.scheduled and self.pairwise:
                        schedulers_made[number].step()
                    if not self.scheduled:
                        fall(optimizer)
                for scheduler in () if self.pairwise else schedulers_made:
                    scheduler.step()
                model.zero_grad()
                slices += 1
        self.states.append(ctx.state_dict())


def with_plain_torch(slices: int = 1, scheduled: bool = True) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Model and optimizers after the same training in one process, with so many batches in a step.

    The gradients of the batches are added as the servers add them, in the pairwise tree. Another order would round
    otherwise, and Muon has no bound for what becomes of that: it computes in bfloat16, and triples small differences
    five times.
    """
    model = Mixed()
    optimizers = optimizers_of(model)
    schedulers = schedulers_of(*optimizers)
    data, tensors = DataSpec(SAMPLES, BATCH), TensorDataset(*dataset(SAMPLES).tensors)
    for epoch in range(EPOCHS):
        for first in range(0, data.slices_per_epoch, slices):
            gradients = []
            for index in range(first, first + slices):
                x, y = tensors[slice_indices(data, 0, epoch, index)]
                loss = F.cross_entropy(model(x), y)
                gradients.append([*torch.autograd.grad(loss, list(model.parameters()))])
            for parameter, total in zip(model.parameters(), pairwise(gradients), strict=True):
                assert total is not None
                parameter.grad = total / slices
            for one in (*optimizers, *(schedulers if scheduled else ())):
                one.step()
            for optimizer in () if scheduled else optimizers:
                fall(optimizer)
            model.zero_grad()
    return model, list(optimizers)
