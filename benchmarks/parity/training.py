"""A training script whose parts the rows of docs/parity.md choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from benchmarks.parity.sides import Data, Side
from tests.support.cluster.programs import Aligned, dataset

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
# 16 batches of 4: 8 steps of two slices.
SAMPLES, STEPS_PER_EPOCH, EPOCHS = 64, 8, 2
DATA = Data(dataset(SAMPLES))


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """SGD with momentum, fused, as servers compute it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW, fused, as servers compute it."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


@dataclass(frozen=True, slots=True)
class Training:
    """A script; call it with a side. Returns weights, buffers and the optimizer's state, by name.

    ``scheduler`` is stepped after each step, or with ``per_epoch`` after each epoch. ``early``: it is made before
    ``prepare``. ``clip``: the largest norm of a step's gradient; 0: not clipped. ``scaler``: with a GradScaler.
    ``each`` is called with model and epoch at the beginning of each epoch.
    """

    model: Callable[[], nn.Module] = Aligned
    optimizer: Make = adamw
    data: Data = DATA
    epochs: int = EPOCHS
    scheduler: Callable[[Any], Any] | None = None
    per_epoch: bool = False
    early: bool = False
    clip: float = 0.0
    scaler: bool = False
    bf16: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    each: Callable[[nn.Module, int], object] = field(default=lambda model, epoch: None)

    def __call__(self, side: Side) -> dict[str, Tensor]:
        model: Any = self.model()
        optimizer: Any = self.optimizer(model.parameters())
        scheduler = self.scheduler(optimizer) if self.scheduler is not None and self.early else None
        model, optimizer, loader = side.prepare(model, optimizer, self.data)
        if self.scheduler is not None:
            scheduler = side.scheduler(scheduler or self.scheduler(optimizer))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=self.scaler)
        for epoch in side.epochs(self.epochs):
            self.each(model, epoch)
            for x, y in loader:
                due = side.due
                with nullcontext() if due else side.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                        scores = model(x)
                    loss = self.loss(scores.float(), y) / self.data.accumulate
                    scaler.scale(side.weighed(loss)).backward()  # type: ignore[no-untyped-call]
                if not due:
                    continue
                if self.clip:
                    if not side.ours:
                        scaler.unscale_(optimizer)
                    side.clip(self.clip)
                scaler.step(optimizer)
                scaler.update()
                if scheduler is not None and not self.per_epoch:
                    scheduler.step()
                optimizer.zero_grad()
            if scheduler is not None and self.per_epoch:
                measured = [validation(model)] if isinstance(made_of(scheduler), ReduceLROnPlateau) else []
                scheduler.step(*measured)
        return flat(side.state())


def made_of(scheduler: Any) -> Any:
    """torch's scheduler inside the scheduler that a side has given."""
    return getattr(scheduler, "wrapped", scheduler)


@torch.no_grad()
def validation(model: nn.Module) -> float:
    """The loss over all of the data, at the weights at hand."""
    x, y = DATA.samples.tensors
    return F.cross_entropy(model(x), y).item()


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of weights, buffers and the optimizer's state by name, of one model or of several."""
    if "model" not in state:
        return {f"{name}.{key}": tensor for name, one in state.items() for key, tensor in flat(one).items()}
    found: dict[str, Tensor] = dict(state["model"])
    several = isinstance(state["optimizer"], list)
    for place, optimizer in enumerate(state["optimizer"] if several else [state["optimizer"]]):
        for number, values in optimizer["state"].items():
            for key, value in values.items():
                found[f"optimizer.{f'{place}.' if several else ''}{number}.{key}"] = torch.as_tensor(value)
    return found
