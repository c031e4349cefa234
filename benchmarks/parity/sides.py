"""The ways to train that docs/parity.md compares, with one interface: a job of ours, plain torch, and DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices, slice_samples
from paramserver.worker.context import Context

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a script, and how it cuts them."""

    samples: TensorDataset
    batch_size: int = 4
    accumulate: int = 1
    shuffle: bool = False
    drop_last: bool = False

    def steps(self, slices: int, epoch: int) -> Iterator[list[tuple[float, list[Batch]]]]:
        """For each step of an epoch its slices: the part of the step's samples that a slice has, and its batches."""
        size = self.batch_size * self.accumulate
        spec = DataSpec(len(self.samples), size, self.drop_last, self.shuffle, self.accumulate, slices)
        schedule = SyncSchedule(spec.slices_per_epoch, slices)
        for version in range(schedule.steps_per_epoch):
            indices = schedule.step(version).slices
            of_all = sum(slice_samples(spec, index) for index in indices)
            yield [
                (
                    slice_samples(spec, index) / of_all,
                    [
                        (x, y)
                        for part in torch.split(torch.tensor(slice_indices(spec, 0, epoch, index)), self.batch_size)
                        for x, y in [self.samples[part]]
                    ],
                )
                for index in indices
            ]


class Side(Protocol):
    """One way to train. A script uses it in place of a context, and is the same for all of them.

    ``ours``: whether it is a job of ours.
    """

    ours: bool

    @property
    def due(self) -> bool:
        """Whether a step belongs after the batch at hand."""

    def prepare(self, model: Any, optimizer: Any, data: Data) -> tuple[Any, Any, Any]:
        """Model, optimizer and loader to train with."""

    def scheduler(self, made: Any) -> Any:
        """The scheduler to step."""

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs."""

    def weighed(self, loss: Tensor) -> Tensor:
        """The loss whose gradient is this batch's part of the step's gradient."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Around a backward pass that is not the last one of a step."""

    def clip(self, max_norm: float) -> None:
        """Clip the gradient of the step."""

    def stepped(self) -> bool:
        """Whether there are new weights since the last call."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""

    def state(self) -> dict[str, Any]:
        """Copies of weights and buffers (``"model"``) and of the optimizer's state (``"optimizer"``)."""


class Ours:
    """A worker of a job."""

    ours = True

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._seen = 0

    def prepare(self, model: Any, optimizer: Any, data: Data) -> tuple[Any, Any, Any]:
        loader: Any = DataLoader(data.samples, data.batch_size, shuffle=data.shuffle, drop_last=data.drop_last)
        found: tuple[Any, Any, Any] = self.ctx.prepare(model, optimizer, loader, accumulate=data.accumulate)
        return found

    def scheduler(self, made: Any) -> Any:
        return self.ctx.prepare(made)

    def epochs(self, count: int) -> Iterator[int]:
        return self.ctx.epochs(count)

    @property
    def due(self) -> bool:
        return self.ctx.step_due

    def weighed(self, loss: Tensor) -> Tensor:
        return loss

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.ctx.no_sync()

    def clip(self, max_norm: float) -> None:
        self.ctx.clip_grad_norm(max_norm)

    def stepped(self) -> bool:
        before, self._seen = self._seen, self.ctx.version
        return self._seen > before

    def load(self, state: Mapping[str, Any]) -> None:
        self.ctx.load(state)

    def state(self) -> dict[str, Any]:
        return self.ctx.state_dict()


class Torch:
    """What plain torch and DDP have in common."""

    ours = False

    def __init__(self) -> None:
        self.due = True
        self.part = 1.0
        self.epoch = 0
        self.model: Any = None
        self.optimizer: Any = None

    def scheduler(self, made: Any) -> Any:
        return made

    def epochs(self, count: int) -> Iterator[int]:
        for self.epoch in range(count):
            yield self.epoch

    def weighed(self, loss: Tensor) -> Tensor:
        return loss * self.part

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def stepped(self) -> bool:
        return True

    def load(self, state: Mapping[str, Any]) -> None:
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def state(self) -> dict[str, Any]:
        model = {name: tensor.detach().clone() for name, tensor in self.bare.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    @property
    def bare(self) -> nn.Module:
        """The model as the script made it."""
        model: nn.Module = self.model
        return model


class Plain(Torch):
    """One process that adds up the gradients of a step's slices."""

    def __init__(self, slices: int) -> None:
        super().__init__()
        self._slices = slices

    def prepare(self, model: Any, optimizer: Any, data: Data) -> tuple[Any, Any, Any]:
        self.model, self.optimizer = model, optimizer
        return model, optimizer, _Batches(self, data, self._slices)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()


class _Batches:
    """The loader of `Plain`."""

    def __init__(self, side: Plain, data: Data, slices: int) -> None:
        self._side, self._data, self._slices = side, data, slices

    def __iter__(self) -> Iterator[Batch]:
        for step in self._data.steps(self._slices, self._side.epoch):
            batches = [(part, batch) for part, batches in step for batch in batches]
            for number, (self._side.part, batch) in enumerate(batches, 1):
                self._side.due = number == len(batches)
                yield batch
