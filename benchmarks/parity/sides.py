"""The ways to train that docs/parity.md compares, with one interface: a job of ours, plain torch, and DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices, slice_samples
from paramserver.worker.context import Context

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a script, and how it cuts them.

    ``order``: gives the samples of an epoch, as a sampler of the script's, or as a stream, if ``stream``.
    """

    samples: TensorDataset
    batch_size: int = 4
    accumulate: int = 1
    shuffle: bool = False
    drop_last: bool = False
    order: Callable[[int], Sequence[int]] | None = None
    stream: bool = False

    def loader(self) -> DataLoader[Any]:
        """As the script makes it."""
        if self.order is None:
            return DataLoader(self.samples, self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last)
        if self.stream:
            return DataLoader(_Stream(self), self.batch_size)
        return DataLoader(self.samples, self.batch_size, sampler=_Sampler(self))

    def steps(self, slices: int, epoch: int) -> Iterator[list[tuple[float, list[Batch]]]]:
        """For each step of an epoch its slices: the part of the step's samples that a slice has, and its batches."""
        size = self.batch_size * self.accumulate
        order = range(len(self.samples)) if self.order is None else self.order(epoch)
        spec = DataSpec(len(order), size, self.drop_last, self.shuffle, self.accumulate, slices)
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
                        for x, y in [self.samples[[order[place] for place in part.tolist()]]]
                    ],
                )
                for index in indices
            ]


class _Sampler(Sampler[int]):
    """Gives the order of the present epoch."""

    def __init__(self, data: Data) -> None:
        assert data.order is not None
        self.order, self.epoch = data.order, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order(0))

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch))


class _Stream(IterableDataset[Batch]):
    """Reads the samples in the order of the present epoch."""

    def __init__(self, data: Data) -> None:
        self.samples, self.sampler = data.samples, _Sampler(data)
        self.set_epoch = self.sampler.set_epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in self.sampler)


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

    def prepare_several(self, model: Any, optimizers: Sequence[Any], data: Data) -> tuple[Any, list[Any], Any]:
        """Model, optimizers and loader to train with."""

    def prepare_part(self, name: str, model: Any, optimizer: Any, turns: int = 1) -> tuple[Any, Any]:
        """One of several models, which makes so many steps on each batch."""

    def prepare_data(self, data: Data) -> Any:
        """The loader, after several models."""

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
        """Go on from a result of `state`."""

    def state(self) -> dict[str, Any]:
        """Copies of weights and buffers (``"model"``) and of the optimizer's state (``"optimizer"``).

        Of several models: these dictionaries by name. Of several optimizers: a list of their states.
        """

    def register(self, name: str, thing: Any) -> None:
        """The state of this object belongs to checkpoints."""

    def evaluate(self, data: Data, measure: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The results of ``measure`` for each batch of the data, in order."""

    def agree(self, mine: float) -> float:
        """A number on which all processes agree."""


class Ours:
    """A worker of a job."""

    ours = True

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._seen = 0
        # Values that were agreed on so far.
        self.agreed: list[float] = []

    def prepare(self, model: Any, optimizer: Any, data: Data) -> tuple[Any, Any, Any]:
        loader: Any = data.loader()
        found: tuple[Any, Any, Any] = self.ctx.prepare(model, optimizer, loader, accumulate=data.accumulate)
        self._seen = self.ctx.version
        return found

    def prepare_several(self, model: Any, optimizers: Sequence[Any], data: Data) -> tuple[Any, list[Any], Any]:
        loader: Any = data.loader()
        model, loader, *found = self.ctx.prepare(model, loader, *optimizers)
        return model, found, loader

    def prepare_part(self, name: str, model: Any, optimizer: Any, turns: int = 1) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self.ctx.prepare(model, optimizer, name=name, turns=turns)
        return found

    def prepare_data(self, data: Data) -> Any:
        return self.ctx.prepare(data.loader())

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

    def register(self, name: str, thing: Any) -> None:
        self.ctx.register(name, thing)

    def evaluate(self, data: Data, measure: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        for x, y in self.ctx.evaluate(data.loader()):
            self.ctx.gather(measure(x, y))
        return self.ctx.gathered

    def agree(self, mine: float) -> float:
        self.agreed.append(self.ctx.agree(mine + self.ctx.rank / 4))
        return self.agreed[-1]


class Torch:
    """The common part of plain torch and DDP."""

    ours = False

    def __init__(self) -> None:
        self.due = True
        self.part = 1.0
        self.epoch = 0
        self.model: Any = None
        self.optimizer: Any = None
        # Several models and their optimizers, by name.
        self.parts: dict[str, tuple[nn.Module, Any]] = {}

    def prepare(self, model: Any, optimizer: Any, data: Data) -> tuple[Any, Any, Any]:
        raise NotImplementedError

    def prepare_several(self, model: Any, optimizers: Sequence[Any], data: Data) -> tuple[Any, list[Any], Any]:
        model, _, loader = self.prepare(model, optimizers[0], data)
        self.optimizer = list(optimizers)
        return model, self.optimizer, loader

    def prepare_part(self, name: str, model: Any, optimizer: Any, turns: int = 1) -> tuple[Any, Any]:
        self.parts[name] = model, optimizer
        return model, optimizer

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
        if self.parts:
            return {name: _state(*part) for name, part in self.parts.items()}
        return _state(self.bare, self.optimizer)

    def register(self, name: str, thing: Any) -> None:
        pass

    def evaluate(self, data: Data, measure: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        return [measure(x, y) for x, y in data.loader()]

    def agree(self, mine: float) -> float:
        return mine

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
        return model, optimizer, self.prepare_data(data)

    def prepare_data(self, data: Data) -> Any:
        return _Batches(self, data, self._slices)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    several = isinstance(optimizer, list)
    found = [copy.deepcopy(one.state_dict()) for one in (optimizer if several else [optimizer])]
    return {"model": weights, "optimizer": found if several else found[0]}


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
