"""Samplers of the user's own: what they choose is shared out, and the bits do not depend on the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from paramserver import errors
from paramserver.core.work.slices import DataSpec, slice_indices, slice_seed
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Outcome, inside, train
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.cluster.reference import Batch, slice_by_slice

SAMPLES, BATCH, EPOCHS, SLICES = 46, 4, 2, 4
Make = Callable[[], DataLoader[Any]]


class ByLength(Sampler[int]):
    """Samples of nearly the same length stand together; which group comes first changes with the epoch."""

    def __init__(self, lengths: list[int], shorter: int = 0) -> None:
        """``shorter``: by so many samples each epoch is shorter than the one before."""
        self.lengths, self.shorter, self.epoch = lengths, shorter, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        turned = order[self.epoch * 7 :] + order[: self.epoch * 7]
        return iter(turned[: len(turned) - self.epoch * self.shorter])


class ByTokens(ByLength):
    """Batches of as many tokens: some have more samples than others."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Any]:
        order, at, size = list(super().__iter__()), 0, 1
        while at < len(order):
            yield order[at : at + size]
            at, size = at + size, size % 4 + 1


class Batches(Dataset[Batch]):
    """Each sample is a batch already."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Batch:
        x, y = dataset(SAMPLES)[4 * (index % 11) : 4 * (index % 11) + 4]
        return x, y


LENGTHS = [(7 * index) % 11 for index in range(SAMPLES)]


def loaded(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), **options)


MAKE: dict[str, Make] = {
    "weighted": lambda: loaded(
        batch_size=BATCH,
        sampler=WeightedRandomSampler([1.0, 3.0] * 23, 30, generator=torch.Generator()),
    ),
    "grouped by length": lambda: loaded(batch_size=BATCH, sampler=ByLength(LENGTHS)),
    "the last batch is dropped": lambda: loaded(batch_size=BATCH, sampler=ByLength(LENGTHS), drop_last=True),
    "shorter epochs": lambda: loaded(batch_size=BATCH, sampler=ByLength(LENGTHS, 30)),
    "batches of the script's": lambda: loaded(batch_sampler=ByTokens(LENGTHS)),
    "no batches": lambda: DataLoader(Batches(), batch_size=None, sampler=ByLength(list(range(13)))),
}


def program(make: Make, seen: list[Any] | None = None) -> Callable[[Context], None]:
    """The script of a user. ``seen``: what its batches have first."""

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, make())
        for epoch in ctx.epochs(EPOCHS):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch + 100)  # the job's epoch counts
            for x, y in loader:
                if seen is not None:
                    seen.append(tuple(x[:, 0].tolist()))
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return script


def in_plain_torch(make: Make) -> list[list[Batch]]:
    """The slices of each step, as torch's own loader gives its batches."""
    loader = make()
    steps = []
    for epoch in range(EPOCHS):
        sampler: Any = loader.sampler if loader.batch_size or loader.batch_sampler is None else loader.batch_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(slice_seed(0, epoch, 1, "generator of the sampler"))
        batches = list(loader)
        steps += [batches[at : at + SLICES] for at in range(0, len(batches), SLICES)]
    return steps


@pytest.mark.parametrize("kind", MAKE)
def test_the_bits_of_plain_torch_with_any_number_of_workers(kind: str) -> None:
    make = MAKE[kind]
    steps = in_plain_torch(make)
    model: Any = network()
    slice_by_slice(model, sgd(model.parameters()), steps, F.cross_entropy)
    one = train(program(make), 1, 1, slices_per_step=SLICES)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(one.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-7)
    for workers in (2, 4):
        assert train(program(make), workers, 2, slices_per_step=SLICES).digests == one.digests


def test_what_stands_for_a_plain_shuffle_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A ``DistributedSampler`` kept by habit, and a ``BatchSampler`` of torch around a plain sampler."""

    def bits(make: Make) -> Outcome:
        return train(program(make), 2, 1, slices_per_step=2)

    shuffled = bits(lambda: loaded(batch_size=BATCH, shuffle=True)).digests
    numbers: Any = dataset(SAMPLES)
    by_habit: Any = DistributedSampler(numbers, num_replicas=2, rank=1)
    assert bits(lambda: loaded(batch_size=BATCH, sampler=by_habit)).digests == shuffled
    assert "the DistributedSampler is left out" in capsys.readouterr().err
    around = BatchSampler(RandomSampler(numbers), BATCH, False)
    assert bits(lambda: loaded(batch_sampler=around)).digests == shuffled


def test_accumulation_goes_with_a_sampler() -> None:
    """A slice has two batches of the sampler; the last step shares out what is left."""

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader = loaded(batch_sampler=ByTokens(LENGTHS))
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=2)
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                loss: Any = F.cross_entropy(model(x), y) / 2
                loss.backward()
                if ctx.step_due:
                    optimizer.step()
                    optimizer.zero_grad()

    one = train(script, 1, 1, slices_per_step=3)
    assert train(script, 3, 1, slices_per_step=3).digests == one.digests


def test_asynchronously_each_entry_of_the_sampler_counts_once() -> None:
    seen: list[Any] = []
    with Cluster(3, 1, "async", 2) as cluster:
        outcome = cluster.train(program(MAKE["batches of the script's"], seen))
    x, _ = dataset(SAMPLES).tensors
    batches = []
    for epoch in range(EPOCHS):
        sampler = ByTokens(LENGTHS)
        sampler.set_epoch(epoch)
        batches += [tuple(x[batch, 0].tolist()) for batch in sampler]
    assert sorted(seen) == sorted(batches)
    assert outcome.summary["contributions_applied"] == 2 * 20, "those without samples are counted, too"


def test_an_order_that_differs_between_workers_ends_the_script() -> None:
    class Different(ByLength):
        """As one that was made from the worker's rank, or from a list whose order is by chance."""

    def script(ctx: Context) -> None:
        lengths = [*LENGTHS] if ctx.rank == 0 else [*reversed(LENGTHS)]
        program(lambda: loaded(batch_size=BATCH, sampler=Different(lengths)))(ctx)

    with (
        Cluster(2, slices_per_step=2) as cluster,
        pytest.raises(errors.DataError, match="Different gives another order of samples in epoch 1"),
    ):
        cluster.train(script)


class Share(DistributedSampler[Any]):
    """Gives the share of a process in a way of its own."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, 10, self.num_replicas))


class Nameless:
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampler": Share(range(10), 2, 0)}, "Share gives one process of 2 its share"),  # type: ignore[arg-type]
        ({"batch_sampler": Nameless()}, "Nameless has no length: give it __len__"),
        ({"sampler": WeightedRandomSampler([1.0], 1), "drop_last": True, "batch_size": 4}, "makes no slice of 4"),
    ],
)
def test_refused(options: dict[str, Any], text: str) -> None:
    numbers: Any = list(range(10))

    def work(ctx: Context) -> None:
        with pytest.raises(errors.DataError, match=text):
            ctx.prepare(DataLoader(numbers, **options))

    inside(work)


def test_only_a_sampler_of_the_scripts_is_asked() -> None:
    """A plain shuffle is a permutation that every member knows, at the cost of a slice."""
    seen: list[Any] = []
    train(program(lambda: loaded(batch_size=BATCH, shuffle=True), seen), 1, 1, slices_per_step=1)
    x, _ = dataset(SAMPLES).tensors
    data = DataSpec(SAMPLES, BATCH)
    assert seen == [tuple(x[slice_indices(data, 0, e, i), 0].tolist()) for e in range(EPOCHS) for i in range(12)]
