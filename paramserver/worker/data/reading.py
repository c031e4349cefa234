"""Reads the samples of requested batches, each batch with seeds of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from paramserver.worker.data.copies import OwnCollate
from paramserver.worker.data.described import tell_epoch
from paramserver.worker.data.generators import OwnGenerators, generators_of
from paramserver.worker.data.seeding import seed_everything


class SliceDataset(torch.utils.data.Dataset[Any]):
    """The user's data set, seeded for the slice before its samples are read (augmentation included).

    Generators that the data set and the ``collate_fn`` own are seeded, too. Attributes are those of the data set: a
    ``worker_init_fn`` finds this object in ``get_worker_info().dataset``.
    """

    _OWN = frozenset(("dataset", "_generators", "_epoch"))

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        self.dataset = dataset
        self._generators = OwnGenerators(partial(generators_of, dataset, collate))
        self._epoch: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN or name.startswith("__"):  # not there yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __getitems__(self, request: Sequence[Any]) -> list[Any]:
        """The samples of one batch; ``request`` is the batch's seed and its epoch, followed by the indices.

        The epoch is -1 where there is none.
        """
        seed, epoch, *indices = request
        if epoch != self._epoch:
            self._begin(epoch)
        seed_everything(seed)
        self._generators.seed(seed)
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self.dataset[index] for index in indices]

    def _begin(self, epoch: int) -> None:
        """A batch of another epoch comes than the last one."""
        self._epoch = epoch
        self._generators.begin_round()
        if epoch >= 0:
            tell_epoch(self.dataset, epoch)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class Single:
    """Stands for the ``collate_fn`` of a loader with ``batch_size=None``, which gets one sample, not a list."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])


def inner_loader(
    loader: DataLoader[Any],
    requests: Any,
    processes: int,
    persistent: bool,
    generator: torch.Generator | None,
    single: bool,
) -> DataLoader[Any]:
    """A loader with the options of the script's, which loads what ``requests`` ask for. ``single``: see `Sampling`."""
    options: dict[str, Any] = {}
    collate = OwnCollate(loader.collate_fn)
    if processes:
        options = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": persistent,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        SliceDataset(loader.dataset, loader.collate_fn),
        batch_sampler=requests,
        num_workers=processes,
        collate_fn=Single(collate) if single else collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        **options,
    )
