"""What a script changes about its loader after ``prepare``: it counts as in plain torch, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import inside, train
from tests.support.cluster.programs import dataset, network, plain

SAMPLES, EPOCHS = 12, 3
# Gets the prepared loader and the script's own.
Change = Callable[[Any, DataLoader[Any]], object]


class Growing(Dataset[Any]):
    def __init__(self) -> None:
        self.samples = SAMPLES

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return dataset(SAMPLES)[index % SAMPLES]


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter([dataset(SAMPLES)[index] for index in range(SAMPLES)])


def doubled(rows: Any) -> Any:
    x, y = default_collate(rows)
    return x * 2, y


def sums(ctx: Context, given: DataLoader[Any], change: Change, epochs: int = EPOCHS) -> list[float]:
    """Trains, and changes the loader before the second epoch; the sum of the batches of each epoch."""
    model: Any = network()
    model, optimizer, loader = ctx.prepare(model, plain(model.parameters(), 0.1), given)
    found = []
    for epoch in ctx.epochs(epochs):
        if epoch == 1:
            change(loader, given)
        found.append(0.0)
        for x, y in loader:
            found[-1] += float(x.double().sum())
            loss: Any = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("data", [Growing, Stream])
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("whose", ["prepared", "script's"])
def test_another_collate_fn_counts_from_the_next_epoch_on(whose: str, processes: int, data: Any) -> None:
    def change(loader: Any, given: DataLoader[Any]) -> None:
        (loader if whose == "prepared" else given).collate_fn = doubled

    def script(ctx: Context) -> None:
        found.extend(sums(ctx, DataLoader(data(), batch_size=4, num_workers=processes), change))

    found: list[float] = []
    train(script)
    assert found == pytest.approx([found[0], 2 * found[0], 2 * found[0]])


class Scaled(Growing):
    scale = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.scale, y


class Told(Scaled):
    def set_epoch(self, epoch: int) -> None:
        self.scale = 1.0 + epoch


@pytest.mark.parametrize("data", [Scaled, Told])
def test_processes_that_stay_read_the_data_set_of_the_present_epoch(data: Any) -> None:
    def change(loader: Any, given: Any) -> None:
        if data is Scaled:
            given.dataset.scale = 2.0

    def script(ctx: Context) -> None:
        given = DataLoader(data(), batch_size=4, num_workers=1, persistent_workers=True)
        found.extend(sums(ctx, given, change, epochs=2))

    found: list[float] = []
    train(script)
    assert found == pytest.approx([found[0], 2 * found[0]])


def test_processes_of_the_loader_may_be_changed() -> None:
    def change(loader: Any, given: DataLoader[Any]) -> None:
        loader.num_workers = 1
        assert given.num_workers == 1

    def script(ctx: Context) -> None:
        found.extend(sums(ctx, DataLoader(Growing(), batch_size=4), change))

    found: list[float] = []
    train(script)
    assert found == pytest.approx([found[0]] * EPOCHS)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_torch_refuses_is_refused_with_the_sentence_of_torch(name: str) -> None:
    def script(ctx: Context) -> None:
        given = DataLoader(Growing(), batch_size=4)
        _, _, loader = ctx.prepare(model := network(), plain(model.parameters()), given)
        with pytest.raises(ValueError, match="should not be set") as of_torch:
            setattr(given, name, None)
        with pytest.raises(ValueError, match="should not be set") as mine:
            setattr(loader, name, None)
        assert str(mine.value) == str(of_torch.value)
        assert getattr(loader, name) is getattr(given, name)

    inside(script)


def larger_batches(loader: Any, given: DataLoader[Any]) -> None:
    loader.batch_sampler.batch_size = 6


def more_samples(loader: Any, given: DataLoader[Any]) -> None:
    loader.dataset.samples += 4


def fewer_samples(loader: Any, given: Any) -> None:
    given.dataset.samples -= 4


def a_short_last_batch(loader: Any, given: DataLoader[Any]) -> None:
    loader.batch_sampler.drop_last = True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (larger_batches, "the batches of the loader have 6 samples, and had 4 when prepared: a job keeps its slices"),
        (more_samples, "the data set has 16 samples, and had 12 when its loader was prepared: a job keeps its slices"),
        (fewer_samples, "the data set has 8 samples, and had 12 when"),
        (a_short_last_batch, "the batch sampler has drop_last=True, and had False when prepared"),
    ],
)
def test_what_would_cut_other_slices_is_refused(change: Change, said: str) -> None:
    def script(ctx: Context) -> None:
        sums(ctx, DataLoader(Growing(), batch_size=4), change)

    with pytest.raises(errors.DataError, match=said):
        train(script)


def test_a_batch_sampler_of_its_own_may_change_within_its_length() -> None:
    class Batches:
        size = 2

        def __len__(self) -> int:
            return SAMPLES // 2

        def __iter__(self) -> Any:
            order = list(range(SAMPLES))
            return iter([order[at : at + self.size] for at in range(0, SAMPLES, self.size)])

    def change(loader: Any, given: DataLoader[Any]) -> None:
        loader.batch_sampler.size = 6

    def script(ctx: Context) -> None:
        found.extend(sums(ctx, DataLoader(Growing(), batch_sampler=Batches()), change))

    found: list[float] = []
    train(script)
    assert found == pytest.approx([found[0]] * EPOCHS)
    assert torch.tensor(found[0]) != 0
