"""What scripts get for ``import paramserver as ps`` when they run as plain torch: the reference.

Nothing is replaced but the order of samples: a loader gives the batches of whole steps, in the order of a job with this
seed. All else is torch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_seed
from paramserver.worker.data.described import describe_loader
from paramserver.worker.data.order import Order, order_of
from paramserver.worker.data.seeding import seed_everything
from paramserver.worker.script.loader import of_batch
from tests.support.behaviour.generate import Form

Array = np.ndarray[Any, Any] | torch.Tensor


def seed_own(owners: Iterable[Any], seed: int) -> None:
    """Seed the generators of these for a batch."""
    for number, generator in enumerate(one.own for one in owners if hasattr(one, "own")):
        generator.seed(slice_seed(seed, 0, number, "own generator"))


class Batches:
    """The batches of each step: a pass gives all epochs up to its own, as far as no pass has given them.

    Passes are numbered, or the context says of which epoch a pass is.
    """

    def __init__(self, context: Context, data: DataSpec, order: Order) -> None:
        self._context, self._data, self._order = context, data, order
        self._schedule = SyncSchedule(data.slices_per_epoch, context.slices)
        self._passes = self._done = 0

    def __len__(self) -> int:
        return -(-self._data.batches_per_epoch // self._schedule.slices_per_step)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._passes if self._context.epoch is None else self._context.epoch
        self._passes += 1
        while self._done < (epoch + 1) * self._schedule.steps_per_epoch:
            step = self._schedule.step(self._done)
            self._done += 1
            number = step.epoch + self._context.first
            # Scripts that draw random numbers, or accumulate, have one slice in a step.
            batches = [batch for one in step.slices for batch in self._order.batches(number, one)]
            if self._data.batches == 1:
                batches = [[sample for batch in batches for sample in batch]] if batches else []
            for nth, batch in enumerate(batches):
                self._context.seeds = slice_seed(0, number, step.slices[0], of_batch("model", nth))
                self._context.step_due = nth + 1 == len(batches)
                seed_own(self._context.data, slice_seed(0, number, step.slices[0], of_batch("data", nth)))
                yield batch


class Loader:
    """Iterates over the batches, seeded as the slices of a job are."""

    def __init__(self, context: Context, loader: DataLoader[Any], accumulate: int) -> None:
        if isinstance(loader.dataset, IterableDataset):
            samples: Any = list(loader.dataset)
            loader = DataLoader(samples, loader.batch_size, drop_last=loader.drop_last, collate_fn=loader.collate_fn)
        data = describe_loader(loader, accumulate, context.slices)
        order = order_of(loader, data, 0, lambda epoch, digest: digest)
        self._context = context
        context.data = (loader.dataset, loader.collate_fn)
        self._inner: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=Batches(context, data, order), collate_fn=loader.collate_fn
        )

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._inner:
            self._context.seed_model()
            # As docs/training.md promises, the data set keeps its samples.
            yield copy.deepcopy(batch)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_context", "_inner"):
            super().__setattr__(name, value)
        else:  # as torch's loader takes it
            setattr(self._inner, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Before the first pass: its number."""
        if self._context.epoch is None and not self._context.told:
            self._context.first, self._context.told = epoch, True


@dataclass(slots=True)
class Context:
    """What ``ps.init`` gives."""

    slices: int
    rank: int = 0
    world_size: int = 1
    is_main: bool = True
    # The epoch in a loop over `epochs`.
    epoch: int | None = None
    seeds: int = 0
    # The number of the first epoch, and whether the script has said it.
    first: int = 0
    told: bool = False
    # What may own a generator, as the attribute ``own``: the data set and the collate_fn.
    data: tuple[Any, ...] = ()
    # Whether the batch is the last one of its slice.
    step_due: bool = True
    # Whether a loader is prepared, and the steps without one.
    loader: bool = False
    steps: int = 0
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    went_back: bool = False
    steps_past_epoch: int = 0
    gathered: list[Any] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=dict)

    def prepare(self, *objects: Any, accumulate: int = 1) -> Any:
        """The same objects; of a loader one in the order of the job."""
        self.models += [o for o in objects if isinstance(o, nn.Module)]
        self.optimizers += [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        self.loader = self.loader or any(isinstance(o, DataLoader) for o in objects)
        if self.models and self.optimizers and not self.loader and not self.seeds:
            self._seed()
            self.optimizers[0].register_step_post_hook(lambda *args: self._seed(1))
        given = tuple(Loader(self, o, accumulate) if isinstance(o, DataLoader) else o for o in objects)
        return given[0] if len(given) == 1 else given

    def _seed(self, more: int = 0) -> None:
        """For the batch that the script draws next: it has no loader."""
        self.steps += more
        self.seeds = slice_seed(0, 0, self.steps, "model")
        self.seed_model()

    def seed_model(self) -> None:
        """The generators of the process, and those that modules own."""
        seed_everything(self.seeds)
        seed_own([module for model in self.models for module in model.modules()], self.seeds)

    def slice_seed(self, purpose: str = "batch") -> int:
        """Of the slice that the next batch is of."""
        return slice_seed(0, 0, self.steps, purpose)

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """All of them."""
        self.first = start
        for self.epoch in range(count - start):
            yield self.epoch + start
        self.epoch = None

    def clip_grad_norm(self, limit: float) -> None:
        """Of the whole step, as far as it is trained."""
        nn.utils.clip_grad_norm_([p for group in self.optimizers[0].param_groups for p in group["params"]], limit)

    def evaluate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """All batches."""
        self.gathered = []
        yield from loader

    def gather(self, value: Any) -> None:
        """Of the batch at hand."""
        self.gathered.append(value)

    def agree(self, value: float, name: str) -> float:
        """There is one worker."""
        self.numbers.setdefault(name, []).append(value)
        return value

    def agreed(self, name: str) -> list[float]:
        """All numbers of this name."""
        return self.numbers.get(name, [])

    def log(self, **metrics: Any) -> None:
        """Nobody looks."""

    def close(self) -> None:
        """There is nothing to leave."""


class Client:
    """What ``ps.Client`` is."""

    def __init__(self) -> None:
        self.version = 0
        self._arrays: dict[str, torch.Tensor] = {}
        self._numpy = True
        self._optimizer: torch.optim.Optimizer | None = None

    def init(self, arrays: Mapping[str, Array], optimizer: Any = "sum", **hypers: float) -> dict[str, Array]:
        """Copies of the arrays, and the optimizer, None for "sum"."""
        self._numpy = all(isinstance(value, np.ndarray) for value in arrays.values())
        self._arrays = {name: torch.as_tensor(value).clone() for name, value in arrays.items()}
        if isinstance(optimizer, torch.optim.Optimizer):
            options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            self._optimizer = type(optimizer)([*self._arrays.values()], **options)
        elif optimizer != "sum":
            kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[optimizer]
            self._optimizer = kind([*self._arrays.values()], **hypers)
        return self.pull()

    def push(self, grads: Mapping[str, Array], samples: int = 1) -> int:
        """One step."""
        for name, value in self._arrays.items():
            value.grad = torch.as_tensor(np.asarray(grads[name]).copy()) if name in grads else None
            if self._optimizer is None and value.grad is not None:
                value += value.grad
        if self._optimizer is not None:
            self._optimizer.step()
        self.version += 1
        return self.version

    def pull(self) -> dict[str, Array]:
        """Copies."""
        copies = {name: value.clone() for name, value in self._arrays.items()}
        return {name: value.numpy() if self._numpy else value for name, value in copies.items()}

    def close(self) -> None:
        """There is nothing to leave."""


class Paramserver:
    """Stands for the module."""

    Client = Client

    def __init__(self, form: Form) -> None:
        self.form = form
        self.context = Context(form.slices)

    def init(self, **settings: Any) -> Context:
        """As the real one seeds."""
        seed_everything(0)
        return self.context
