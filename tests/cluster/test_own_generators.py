"""Data and models that draw from generators of their own: the bits do not depend on the number of workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

from paramserver.worker.context import Context
from tests.support.cluster.harness import train
from tests.support.cluster.programs import dataset, network, plain

SAMPLES, EPOCHS, SLICES = 24, 2, 2


class Noisy(Dataset[Any]):
    """Adds noise of a generator of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = dataset(SAMPLES)[index]
        return x + self.draw(), y


class NoiseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


def collate_with(generator: random.Random) -> Callable[[Any], Any]:
    def collate(rows: Any) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return x * generator.random(), y

    return collate


def in_data() -> tuple[DataLoader[Any], nn.Module]:
    generator = np.random.default_rng(1)
    return DataLoader(Noisy(lambda: float(generator.normal())), batch_size=4, shuffle=True), network()


def in_collate_fn() -> tuple[DataLoader[Any], nn.Module]:
    return DataLoader(dataset(SAMPLES), batch_size=4, collate_fn=collate_with(random.Random(2))), network()


def in_the_model() -> tuple[DataLoader[Any], nn.Module]:
    return DataLoader(dataset(SAMPLES), batch_size=4), nn.Sequential(NoiseLayer(), network())


def in_processes() -> tuple[DataLoader[Any], nn.Module]:
    generator = random.Random(7)
    data = Noisy(generator.random)
    return DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True), network()


def train_with(make: Callable[[], tuple[DataLoader[Any], nn.Module]], workers: int) -> Any:
    def script(ctx: Context) -> None:
        loader, model = make()
        model, optimizer, batches = ctx.prepare(model, plain(model.parameters(), 0.1), loader)
        for _ in ctx.epochs(EPOCHS):
            for x, y in batches:
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        evaluated = DataLoader(dataset(SAMPLES), batch_size=4)
        for x, _ in ctx.evaluate(evaluated):
            ctx.gather(float(model(x).detach().sum()))
        results.append(ctx.gathered)

    results: list[Any] = []
    digests = train(script, workers=workers, slices_per_step=SLICES).digests
    assert all(one == results[0] for one in results)
    return digests, results[0]


@pytest.mark.parametrize("make", [in_data, in_collate_fn, in_the_model, in_processes])
def test_the_bits_do_not_depend_on_the_number_of_workers(make: Callable[[], Any]) -> None:
    assert train_with(make, workers=1) == train_with(make, workers=2)


def said_of(script: Callable[[Context], None]) -> list[str]:
    settings: dict[str, object] = {"cluster__coordinator": "somewhere:1"}  # a script that trains alone says nothing
    with capture_logs() as logs:
        train(script, workers=2, slices_per_step=SLICES, settings=settings)
    return sorted({one["event"].partition(".")[0] for one in logs if "in its loop over the prepared" in one["event"]})


def steps(ctx: Context, beside: Callable[[Any], Any], noise: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Trains in the loop over what ``beside`` makes of the prepared loader."""
    model: Any = network()
    model, optimizer, loader = ctx.prepare(
        model, plain(model.parameters(), 0.1), DataLoader(dataset(SAMPLES), batch_size=4)
    )
    for (x, y), more in beside(loader):
        loss: Any = F.cross_entropy(model(x + noise(x, more)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def second_loader() -> DataLoader[Any]:
    data = TensorDataset(torch.zeros(SAMPLES, 8))
    return DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))


def zipped(ctx: Context) -> None:
    other = second_loader()
    steps(ctx, lambda loader: zip(loader, other, strict=False), lambda x, more: more[0][: len(x)])


def asked_for_in_the_body(ctx: Context) -> None:
    batches = iter(second_loader())
    steps(ctx, lambda loader: ((one, None) for one in loader), lambda x, more: next(batches)[0][: len(x)])


def own_draws(ctx: Context) -> None:
    own = torch.Generator().manual_seed(5)
    steps(ctx, lambda loader: ((one, None) for one in loader), lambda x, more: torch.randn(x.shape, generator=own))


def own_draws_that_are_seeded(ctx: Context) -> None:
    own = torch.Generator()

    def noise(x: torch.Tensor, more: Any) -> torch.Tensor:
        return torch.randn(x.shape, generator=own.manual_seed(ctx.slice_seed()))

    steps(ctx, lambda loader: ((one, None) for one in loader), noise)


def a_loader_that_stands_by(ctx: Context) -> None:
    other = second_loader()
    steps(ctx, lambda loader: ((one, None) for one in loader), lambda x, more: x * len(other))


ANOTHER = "the script draws batches of another DataLoader in its loop over the prepared loader"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (zipped, [ANOTHER]),
        (asked_for_in_the_body, [ANOTHER]),
        (own_draws, ["the script draws from the generator 'own' in its loop over the prepared loader"]),
        (own_draws_that_are_seeded, []),
        (a_loader_that_stands_by, []),
    ],
)
def test_draws_of_the_script_itself_are_said(script: Callable[[Context], None], said: list[str]) -> None:
    assert said_of(script) == said


# ---- batches of a script that has prepared no loader


def loops(ctx: Context, batches: Callable[[Any], Any]) -> None:
    """Trains on what ``batches`` gives for the context, without a prepared loader."""
    model: Any = network()
    model, optimizer = ctx.prepare(model, plain(model.parameters(), 0.1))
    for x, y in batches(ctx):
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_a_loop(ctx: Context) -> None:
    trained = DataLoader(dataset(SAMPLES), batch_size=4)
    loops(ctx, lambda _: (batch for _, batch in enumerate(trained)))


def shuffled_in_an_object(ctx: Context) -> None:
    class Trainer:
        loader = DataLoader(dataset(SAMPLES), batch_size=4, shuffle=True)

    trainer = Trainer()
    loops(ctx, lambda _: iter(trainer.loader))


def shared_out_by_the_script(ctx: Context) -> None:
    data = dataset(SAMPLES)
    loops(ctx, lambda ctx: iter(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, ctx.rank))))


def drawn_by_seed(ctx: Context) -> None:
    data = dataset(SAMPLES)
    first = iter(DataLoader(data, batch_size=4))  # to look at a batch
    next(first)
    loops(ctx, lambda _: (data[torch.randint(SAMPLES, (4,))] for _ in range(4)))


def drawn_by_a_loader(ctx: Context) -> None:
    data = dataset(SAMPLES)
    sampler = RandomSampler(data, replacement=True)
    loops(ctx, lambda _: iter(DataLoader(data, batch_size=4, sampler=sampler)))


NOT_GOT = "the script trains on batches of a DataLoader that ctx.prepare has not got"


@pytest.mark.parametrize(
    ("script", "workers", "said"),
    [
        (in_a_loop, 2, [f"{NOT_GOT}: 'trained'"]),
        (shuffled_in_an_object, 2, [NOT_GOT]),
        (in_a_loop, 1, []),
        (shared_out_by_the_script, 2, []),
        (drawn_by_seed, 2, []),
        (drawn_by_a_loader, 2, []),
    ],
)
def test_a_loader_that_was_never_prepared_is_said_once(
    script: Callable[[Context], None], workers: int, said: list[str]
) -> None:
    with capture_logs() as logs:
        train(script, workers=workers, slices_per_step=SLICES)
    found = [one["event"].partition(". ")[0] for one in logs if NOT_GOT in one["event"]]
    assert found == said
