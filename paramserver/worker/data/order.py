"""Which samples the batches of a slice have: by the permutation that all members know, or by the script's sampler."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader, Sampler

from paramserver import errors
from paramserver.core.work.slices import DataSpec, places_of, slice_batches, slice_indices, slice_samples, slice_seed
from paramserver.worker.data.described import Sampling, sampling_of
from paramserver.worker.data.generators import KINDS, generators_of, seed_generator, seed_generators
from paramserver.worker.data.seeding import seeded

# Epochs whose orders are kept. In asynchronous mode slices of several epochs may come in turn.
_KEPT = 3
# How deep samplers are looked through for other samplers and for generators.
_DEPTH = 4
# Gives a number for an epoch, returns the number that all workers have.
Agree = Callable[[int, float], float]


class Order(Protocol):
    """The samples of each slice, in batches."""

    def batches(self, epoch: int, index: int) -> list[list[Any]]:
        """The indices of a slice's samples, for each of its batches. Empty if the slice has no samples."""

    def shape(self, epoch: int, index: int) -> tuple[int, int]:
        """How many batches and samples a slice has."""


class Permuted:
    """All samples of the data set, each once, shuffled or in their order. Takes time for the slice only."""

    def __init__(self, data: DataSpec, seed: int) -> None:
        self._data, self._seed = data, seed

    def batches(self, epoch: int, index: int) -> list[list[Any]]:
        indices, size = slice_indices(self._data, self._seed, epoch, index), self._data.batch_size
        return [indices[at : at + size] for at in range(0, len(indices), size)]

    def shape(self, epoch: int, index: int) -> tuple[int, int]:
        return slice_batches(self._data, index), slice_samples(self._data, index)


class Drawn:
    """The order that a sampler of the script's gives, drawn once for each epoch from a seed of that epoch.

    An epoch may be shorter than the sampler's length: its last slices are then shorter, or have no batches. Raises
    DataError for an epoch that is longer, and if the order differs from that of another worker.
    """

    def __init__(self, data: DataSpec, sampling: Sampling, seed: int, agree: Agree) -> None:
        self._data, self._sampling, self._seed, self._agree = data, sampling, seed, agree
        self._orders: OrderedDict[int, Sequence[Any]] = OrderedDict()

    def batches(self, epoch: int, index: int) -> list[list[Any]]:
        order, size = self._order(epoch), self._data.batch_size
        start, stop = places_of(self._data, index)
        stop = min(stop, len(order))
        if self._sampling.whole:
            return [list(batch) for batch in order[start:stop]]
        return [list(order[at : min(at + size, stop)]) for at in range(start, stop, size)]

    def shape(self, epoch: int, index: int) -> tuple[int, int]:
        batches = self.batches(epoch, index)
        return len(batches), sum(map(len, batches))

    def _order(self, epoch: int) -> Sequence[Any]:
        found = self._orders.get(epoch)
        if found is None:
            found = self._orders[epoch] = self._draw(epoch)
            if len(self._orders) > _KEPT:
                self._orders.popitem(last=False)
        return found

    def _draw(self, epoch: int) -> Sequence[Any]:
        sampler, most = self._sampling.sampler, self._data.samples
        drawn = draw(sampler, most + 1, self._seed, epoch)
        if len(drawn) > most:
            raise errors.DataError(
                f"{type(sampler).__name__} gives more in epoch {epoch + 1} than the {most} of its len() when it was "
                "prepared: let __len__ be the largest number that it gives in an epoch"
            )
        if self._sampling.drop_last:
            drawn = drawn[: len(drawn) // self._data.batch_size * self._data.batch_size]
        mine = _digest(drawn)
        if self._agree(epoch, mine) != mine:
            raise errors.DataError(
                f"{type(sampler).__name__} gives another order of samples in epoch {epoch + 1} here than in another "
                "worker: let it draw from torch, NumPy or random, or from a generator that it has as an attribute "
                "(they are seeded for each epoch), or from its set_epoch(epoch), and not from what it did before"
            )
        return drawn


def order_of(loader: DataLoader[Any], data: DataSpec, seed: int, agree: Agree) -> Order:
    """The order of samples of a loader that was described as this data."""
    return Drawn(data, sampling_of(loader), seed, agree) if data.drawn else Permuted(data, seed)


def draw(sampler: Any, most: int, seed: int, epoch: int) -> Sequence[Any]:
    """The entries that a sampler gives in an epoch, ``most`` at most.

    All generators of the process, and those that can be reached from the sampler, are seeded before. Those of the
    process are afterwards as they were.
    """
    with seeded(slice_seed(seed, epoch, 0, "sampler")):
        seed_generators(generators_of(sampler), slice_seed(seed, epoch, 0, "generators of the sampler"))
        for number, one in enumerate(_things(sampler, _DEPTH)):
            seed_generator(one, slice_seed(seed, epoch, number, "generator of the sampler"))
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        drawn = list(islice(iter(sampler), most))
    try:
        return array("q", drawn)  # takes a quarter of the memory
    except (TypeError, OverflowError):
        return drawn


def _things(sampler: Any, depth: int) -> Iterator[Any]:
    """A sampler, and the samplers and generators that it has as attributes, always in the same order."""
    yield sampler
    for _, value in sorted(getattr(sampler, "__dict__", {}).items()):
        if isinstance(value, KINDS):
            yield value
        elif isinstance(value, Sampler) and depth:
            yield from _things(value, depth - 1)


def _digest(drawn: Sequence[Any]) -> float:
    """A whole number below 2**48, which depends on all entries."""
    raw = drawn.tobytes() if isinstance(drawn, array) else repr(drawn).encode()
    return float(int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "little"))
