"""A script changes its batches in their places, and slices are computed again: each batch is as it was read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paramserver.worker.context import Context
from paramserver.worker.data.copies import OwnCollate
from paramserver.worker.data.streams import Stream
from tests.support.cluster.harness import train
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig, same

SAMPLES, BATCH, EPOCHS, SLICES = 64, 4, 2, 4


class Kept(Dataset[Any]):
    """Keeps its samples in memory, and gives them away as they are."""

    def __init__(self) -> None:
        x, y = dataset(SAMPLES).tensors
        self.samples = [(x[index].clone(), y[index].clone()) for index in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Batched(Dataset[Any]):
    """Its samples are batches: parts of one array."""

    def __init__(self) -> None:
        x, y = dataset(SAMPLES).tensors
        self.x, self.y = x.numpy().copy().reshape(-1, BATCH, x.shape[1]), y.numpy().copy().reshape(-1, BATCH)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Read(IterableDataset[Any]):
    """Reads samples that it keeps in memory."""

    def __init__(self) -> None:
        self.kept = Kept()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(self.kept.samples)


def as_it_is(samples: Any) -> Any:
    return samples


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "a stream": lambda: DataLoader(Read(), batch_size=BATCH),
    "a stream whose samples are not collated": lambda: DataLoader(Read(), batch_size=BATCH, collate_fn=as_it_is),
    "samples that are collated": lambda: DataLoader(Kept(), batch_size=BATCH, shuffle=True),
    "samples that are not collated": lambda: DataLoader(Kept(), batch_size=BATCH, shuffle=True, collate_fn=as_it_is),
    "batches of the data set": lambda: DataLoader(Batched(), batch_size=None, shuffle=True),
    "samples of processes": lambda: DataLoader(
        Kept(), batch_size=BATCH, shuffle=True, collate_fn=as_it_is, num_workers=1, multiprocessing_context="fork"
    ),
}


class Script:
    """Changes each batch in its place."""

    def __init__(self, make: Callable[[], DataLoader[Any]], dies: Callable[[], object] | None = None) -> None:
        self.make, self.dies = make, dies

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, self.make())
        for _ in ctx.epochs(EPOCHS):
            for batch in loader:
                if isinstance(batch, list) and isinstance(batch[0], tuple):
                    for x, _ in batch:
                        x.div_(2)
                    x, y = torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])
                else:
                    x, y = batch
                    x.div_(2)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if ctx.version == 2 and self.dies is not None:
                    dies, self.dies = self.dies, None
                    dies()
                optimizer.step()
                optimizer.zero_grad()


def undisturbed(ctx: Context) -> None:
    """What all of them come to: the same numbers without changes in place."""
    model: Any = network()
    optimizer: Any = sgd(model.parameters())
    x, y = dataset(SAMPLES).tensors
    model, optimizer, loader = ctx.prepare(
        model, optimizer, DataLoader(torch.utils.data.TensorDataset(x / 2, y), batch_size=BATCH, shuffle=True)
    )
    for _ in ctx.epochs(EPOCHS):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_slice_that_is_computed_again_has_the_batch_as_it_was_read(kind: str, tmp_path: Path) -> None:
    wanted = train(Script(LOADERS[kind]), slices_per_step=SLICES).summary
    with Rig(tmp_path, 1000) as rig:
        rig.begin(Script(LOADERS[kind], rig.goes_back))
        summary = rig.finish()
    same(summary, wanted)


@pytest.mark.parametrize("kind", ["samples that are collated", "samples that are not collated"])
def test_each_epoch_has_the_samples_of_the_data_set(kind: str) -> None:
    wanted = train(undisturbed, slices_per_step=SLICES)
    assert train(Script(LOADERS[kind]), 2, slices_per_step=SLICES).digests == wanted.digests


class Locked:
    """Cannot be copied."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.lock = x, threading.Lock()


def test_a_batch_of_a_stream_that_cannot_be_copied_is_read_again() -> None:
    loader: Any = DataLoader(
        Read(), batch_size=BATCH, collate_fn=lambda samples: Locked(torch.stack([x for x, _ in samples]))
    )
    stream = Stream(loader, 0, lambda epoch, digest: digest)
    first, again = stream.batch(0, 1), stream.batch(0, 1)
    assert first is not None
    assert again is not None
    first[1].x.div_(2)
    assert torch.equal(first[1].x * 2, again[1].x)


def test_only_what_the_data_set_may_keep_is_copied() -> None:
    kept = torch.arange(6.0)
    samples = [{"x": kept[:3], "n": 1}, {"x": kept[3:], "n": 2}]
    made = OwnCollate(lambda given: {"first": given[0]["x"], "all": torch.stack([one["x"] for one in given])})(samples)
    made["first"].zero_()
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    whole = {"all": torch.stack([kept, kept])}
    assert OwnCollate(lambda given: whole)(samples) is whole
