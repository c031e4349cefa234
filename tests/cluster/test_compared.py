"""Data that differs between workers: samples are compared when a loader is prepared, and when it is first evaluated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, train
from tests.support.cluster.programs import dataset, network, plain

SAMPLES = 40
# Scripts that train alone compare nothing, and members of a test have no address.
COMPARED: dict[str, object] = {"cluster__coordinator": "somewhere:1"}
Make = Callable[[Context], DataLoader[Any]]


def program(make: Make, test: Make | None = None, epochs: int = 1) -> Callable[[Context], None]:
    """The script of a user."""

    def script(ctx: Context) -> None:
        model: Any = network()
        model, optimizer, loader = ctx.prepare(model, plain(model.parameters()), make(ctx))
        evaluated = None if test is None else test(ctx)
        for _ in ctx.epochs(epochs):
            for x, y in loader:
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if evaluated is not None:
                for x, _ in ctx.evaluate(evaluated):
                    ctx.gather(len(x))

    return script


def refused(script: Callable[[Context], None]) -> str:
    """The sentence with which one of two workers is refused."""
    with Cluster(workers=2) as cluster, pytest.raises(errors.DataError) as caught:
        cluster.train(script, COMPARED)
    return str(caught.value)


def in_order(ctx: Context) -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), batch_size=4)


def in_an_order_of_its_own(ctx: Context) -> DataLoader[Any]:
    order = list(range(SAMPLES))
    random.Random(ctx.rank).shuffle(order)
    return DataLoader(Subset(dataset(SAMPLES), order), batch_size=4)


def with_batches_of_its_own(ctx: Context) -> DataLoader[Any]:
    data = Subset(dataset(SAMPLES), range(SAMPLES - ctx.rank))
    return DataLoader(data, batch_sampler=[[0, 1], [2, 3]])


def test_another_order_is_refused_with_the_index_and_the_workers() -> None:
    said = refused(program(in_an_order_of_its_own))
    assert said.startswith("sample 0 of the data set is another one here (worker-")
    assert {"worker-0", "worker-1"} <= {word.strip("():") for word in said.split()}
    assert "training.compare_samples=false" in said


def test_one_sample_that_differs_is_found_among_few() -> None:
    def make(ctx: Context) -> DataLoader[Any]:
        data = dataset(8)
        if ctx.rank == 1:
            data.tensors[0][5, 0] += 1e-3
        return DataLoader(data, batch_size=4)

    assert refused(program(make)).startswith("sample 5 of the data set is another one here")


def test_data_that_is_evaluated_is_compared_too() -> None:
    said = refused(program(in_order, in_an_order_of_its_own))
    assert said.startswith("sample 0 of the data set of ctx.evaluate is another one here")


def test_a_batch_sampler_does_not_hide_another_number_of_samples() -> None:
    said = refused(program(with_batches_of_its_own))
    assert said.startswith("the data set has 39 samples here (worker-1), and 40 in worker-0") or said.startswith(
        "the data set has 40 samples here (worker-0), and 39 in worker-1"
    )


def test_differences_that_are_meant() -> None:
    train(program(in_an_order_of_its_own), workers=2, settings={**COMPARED, "training__compare_samples": False})


class Noisy(Dataset[Any]):
    """Augments with the generators of the process, and counts how often it is read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        x, y = dataset(8)[index]
        return x + torch.randn(x.shape) + random.random(), y


class Unseeded(Noisy):
    """Draws from a generator that nobody can seed."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.SystemRandom().random(), y


def test_augmentation_is_no_difference_and_reading_leaves_no_trace() -> None:
    sets = [Noisy(), Noisy()]
    of_torch, of_python = torch.get_rng_state(), random.getstate()

    def script(ctx: Context) -> None:
        ctx.prepare(DataLoader(sets[ctx.rank], batch_size=4))
        assert sets[ctx.rank].read == 0

    with Cluster(workers=2) as cluster:
        for _ in range(2):
            cluster.start(script, COMPARED)
        cluster.join()
    assert torch.equal(of_torch, torch.get_rng_state())
    assert of_python == random.getstate()


def test_what_is_random_by_itself_is_left_out_and_said() -> None:
    with capture_logs() as logs:
        train(program(lambda ctx: DataLoader(Unseeded(), batch_size=4)), workers=2, settings=COMPARED)
    said = [one["event"] for one in logs if "differs when it is read again" in one["event"]]
    assert len(said) == 1
    assert said[0].startswith("sample 0 of the Unseeded differs")


class Deadly(Noisy):
    """Its reader dies, or waits for ever."""

    def __init__(self, how: Callable[[], object]) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is None and not self.read:
            self.how()
        return dataset(8)[index]


@pytest.mark.parametrize("how", ["raises", "dies", "waits"])
def test_a_sample_that_cannot_be_read_is_not_compared(how: str) -> None:
    import os
    import threading

    does = {"raises": lambda: 1 // 0, "dies": lambda: os._exit(3), "waits": lambda: threading.Event().wait()}[how]

    def script(ctx: Context) -> None:
        ctx.prepare(DataLoader(Deadly(does), batch_size=4))

    with Cluster(workers=2) as cluster:
        for _ in range(2):
            cluster.start(script, COMPARED)
        cluster.join()


class Stream(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        data = dataset(8)
        return iter([data[(index + self.rank) % 8] for index in range(8)])

    def __len__(self) -> int:
        return 8


def test_streams_are_compared_by_the_first_batch_of_each_epoch() -> None:
    said = refused(program(lambda ctx: DataLoader(Stream(ctx.rank), batch_size=4)))
    assert "gives another first batch in epoch 1 here" in said
