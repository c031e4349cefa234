"""The real data sets of Hugging Face, and torchdata's loader: ``make test-frameworks`` installs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from datasets import Dataset, disable_progress_bars
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from paramserver.worker.context import Context
from paramserver.worker.data.streams import Stream
from tests.support.cluster.harness import train
from tests.support.cluster.programs import dataset, network, sgd

SAMPLES, BATCH, EPOCHS, SLICES = 46, 4, 3, 4
Make = Callable[[], Any]


def rows() -> Any:
    """As a data set of Hugging Face, whose columns are tensors."""
    disable_progress_bars()
    x, y = dataset(SAMPLES).tensors
    return Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")


def trained(make: Make, workers: int, seen: list[Any] | None = None, **options: Any) -> tuple[str, str, str]:
    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, make(), **options)
        for _ in ctx.epochs(EPOCHS):
            for batch in loader:
                x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
                if seen is not None:
                    seen.append(x[:, 0].tolist())
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return train(script, workers, 1, slices_per_step=SLICES).digests


def plain() -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), BATCH, shuffle=True)


def test_a_map_style_data_set() -> None:
    assert trained(lambda: DataLoader(rows(), BATCH, shuffle=True), 2) == trained(plain, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_iterable_data_set(shuffle: bool) -> None:
    """With shuffling each epoch has another order, which follows from its seed and set_epoch."""

    def make() -> DataLoader[Any]:
        stream = rows().to_iterable_dataset(num_shards=2)
        return DataLoader(stream.shuffle(seed=3, buffer_size=10) if shuffle else stream, BATCH)

    seen: list[Any] = []
    one = trained(make, 1, seen, batches=12)
    epochs = [seen[at : at + 12] for at in range(0, 36, 12)]
    x, _ = dataset(SAMPLES).tensors
    for epoch in epochs:
        assert sorted(v for batch in epoch for v in batch) == sorted(x[:, 0].tolist()), "each sample once"
    assert (epochs[0] == epochs[1]) is not shuffle
    assert trained(make, 3, batches=12) == one


def test_a_state_of_the_data_set_saves_reading() -> None:
    """Batches are the same from a state and from the beginning."""

    def stream() -> Stream:
        numbers = Dataset.from_dict({"n": list(range(1000))}).to_iterable_dataset(num_shards=4)
        return Stream(DataLoader(numbers, 2), 0, lambda epoch, digest: digest, kept=2)

    one, other = stream(), stream()
    wanted = {(epoch, at): one.batch(epoch, at)[1]["n"].tolist() for epoch in (0, 1) for at in (0, 70, 140, 300)}  # type: ignore[index]
    for epoch, at in [(0, 300), (0, 70), (0, 140), (0, 0), (1, 140), (1, 70), (1, 300)]:
        assert other.batch(epoch, at)[1]["n"].tolist() == wanted[epoch, at]  # type: ignore[index]


# The package calls a function of torch that does nothing any more.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdatas_loader(shuffle: bool) -> None:
    def stateful() -> Any:
        return StatefulDataLoader(dataset(SAMPLES), BATCH, shuffle=shuffle)

    one = trained(stateful, 1)
    assert trained(stateful, 3) == one
    if not shuffle:
        assert one == trained(lambda: DataLoader(dataset(SAMPLES), BATCH), 1)
