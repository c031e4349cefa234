"""Small models, data and training loops for the tests of whole jobs. None of them draws torch's own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paramserver.worker.context import Context

Optimizer = Callable[..., torch.optim.Optimizer]
Schedule = Callable[[torch.optim.Optimizer, int], LRScheduler]

FEATURES, HIDDEN, CLASSES = 8, 37, 3


def generator(seed: int = 0) -> torch.Generator:
    """Numbers of its own, since workers are threads of one process."""
    return torch.Generator().manual_seed(seed)


def dataset(samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Points with a class that a small network can learn."""
    x = torch.randn(samples, FEATURES, generator=generator(1), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()
    return TensorDataset(x.to(dtype), y)


def fill(model: nn.Module, seed: int = 2) -> nn.Module:
    """The same initial values everywhere."""
    numbers = generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) * 0.3)
    return model


def network(norm: bool = False, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> nn.Module:
    """Two layers, with BatchNorm between them or not."""
    middle: list[nn.Module] = [nn.BatchNorm1d(hidden)] if norm else []
    model = nn.Sequential(nn.Linear(FEATURES, hidden), *middle, nn.Tanh(), nn.Linear(hidden, CLASSES))
    return fill(model.to(dtype))


class Aligned(nn.Module):
    """Every tensor fills whole vector registers.

    The kernels of torch end a tensor that does not element by element, with other roundings than in the middle;
    servers keep tensors in a row and pad them.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 48, dtype=dtype)
        self.second = nn.Linear(48, CLASSES, bias=False, dtype=dtype)
        fill(self)

    def forward(self, x: Tensor) -> Any:
        """Scores of the classes."""
        return self.second(torch.tanh(self.first(x)))


def sgd(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3, **options)


def adamw(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=0.01, **options)


def plain(parameters: Iterable[Any], lr: float = 1.0) -> torch.optim.Optimizer:
    """SGD and nothing else."""
    return torch.optim.SGD(parameters, lr=lr)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """A cosine over the whole training."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


# By worker, the model and the optimizer that its script trains.
_trained: WeakKeyDictionary[Context, tuple[nn.Module, torch.optim.Optimizer]] = WeakKeyDictionary()


def model_of(ctx: Context) -> nn.Module:
    """The model that a `Program` or a `LedgerProgram` trains with this context."""
    return _trained[ctx][0]


def optimizer_of(ctx: Context) -> torch.optim.Optimizer:
    """The optimizer that a `Program` or a `LedgerProgram` steps with this context."""
    return _trained[ctx][1]


class Program:
    """A training script as users write it. Call it with a context."""

    def __init__(
        self,
        data: Dataset[Any],
        batch_size: int,
        epochs: int = 2,
        model: Callable[[], nn.Module] = network,
        optimizer: Optimizer = sgd,
        schedule: Schedule | None = None,
        loss: Callable[..., Any] = F.cross_entropy,
        shuffle: bool = True,
        drop_last: bool = False,
        each: Callable[[Context, int], object] | None = None,
    ) -> None:
        """``each`` is called before every ``optimizer.step()`` with the number of this worker's slices so far."""
        self.data, self.batch_size, self.epochs = data, batch_size, epochs
        self.model, self.optimizer, self.schedule, self.loss = model, optimizer, schedule, loss
        self.shuffle, self.drop_last, self.each = shuffle, drop_last, each

    def __call__(self, ctx: Context) -> None:
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        loader = ctx.prepare(
            DataLoader(self.data, batch_size=self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last)
        )
        scheduler = self.schedule(optimizer, self.epochs * len(loader)) if self.schedule is not None else None
        model, optimizer = ctx.prepare(model, optimizer)
        _trained[ctx] = model, optimizer
        if scheduler is not None:
            scheduler = ctx.prepare(scheduler)
        slices = 0
        for _ in ctx.epochs(self.epochs):
            for x, y in loader:
                loss = self.loss(model(x), y)
                loss.backward()
                if self.each is not None:
                    self.each(ctx, slices)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
                ctx.log(loss=loss)
                slices += 1


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Ledger(nn.Module):
    """Every sample adds 1 to a cell of its own, if slices are applied one by one with SGD and a learning rate of 1."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(samples))

    def forward(self, indices: Tensor) -> Tensor:
        """Minus the sum of the cells: its gradient is minus one in each."""
        return -self.cells[indices].sum()


class LedgerProgram:
    """Trains a ledger. ``each`` is called before every ``optimizer.step()`` with this worker's number of slices."""

    def __init__(
        self, samples: int, batch_size: int, epochs: int, each: Callable[[Context, int], object] | None = None
    ) -> None:
        self.samples, self.batch_size, self.epochs, self.each = samples, batch_size, epochs, each

    def __call__(self, ctx: Context) -> None:
        model: nn.Module = Ledger(self.samples)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(Numbers(self.samples), batch_size=self.batch_size, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        _trained[ctx] = model, optimizer
        slices = 0
        for _ in ctx.epochs(self.epochs):
            for indices in loader:
                model(indices).backward()
                if self.each is not None:
                    self.each(ctx, slices)
                optimizer.step()
                optimizer.zero_grad()
                slices += 1


def minimise(ctx: Context, model: Any, optimizer: Any, data: Dataset[Any], epochs: int = 1) -> None:
    """A loop over batches of 4, whose loss is the mean of the model's output."""
    loader: Any = DataLoader(data, batch_size=4)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(epochs):
        for x, _ in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
