"""The order that a sampler of the script's gives: the same from the same seed and epoch, whatever happened before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler

from paramserver import errors
from paramserver.core.work.slices import DataSpec
from paramserver.worker.data.described import Sampling
from paramserver.worker.data.order import Drawn, draw
from paramserver.worker.data.seeding import states

N = 20


class Own(Sampler[int]):
    """Draws from one source of chance, which goes on from epoch to epoch."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.epoch = -1
        self.asked = 0

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        if isinstance(self.source, torch.Generator):
            return iter(torch.randperm(N, generator=self.source).tolist())
        if isinstance(self.source, np.random.Generator | np.random.RandomState):
            return iter(self.source.permutation(N))
        if self.source is None:
            return iter([random.randrange(N) + int(np.random.randint(3)) for _ in range(N)])
        return iter(self.source.sample(range(N), N))


SAMPLERS: dict[str, Any] = {
    "torch": lambda: Own(torch.Generator()),
    "NumPy": lambda: Own(np.random.default_rng()),
    "old NumPy": lambda: Own(np.random.RandomState()),
    "Python": lambda: Own(random.Random()),
    "of the process": lambda: Own(None),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0] * 10, N),
    "weighted with a generator": lambda: WeightedRandomSampler([1.0, 2.0] * 10, N, generator=torch.Generator()),
    "inside of another": lambda: BatchSampler(Own(random.Random()), 3, False),
    "replacement": lambda: RandomSampler(range(N), replacement=True),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_order_follows_from_seed_and_epoch_alone(kind: str) -> None:
    one, other = SAMPLERS[kind](), SAMPLERS[kind]()
    first = [list(draw(one, N, 7, epoch)) for epoch in range(3)]
    torch.rand(5), np.random.rand(5), random.random()
    assert [list(draw(other, N, 7, epoch)) for epoch in (2, 1, 0)] == first[::-1]
    assert first[0] != first[1], "each epoch has an order of its own"
    assert list(draw(other, N, 8, 0)) != first[0], "and so has each seed"


def test_generators_of_the_process_are_afterwards_as_they_were() -> None:
    before = states()
    draw(Own(None), N, 7, 0)
    assert states() == before


def test_an_epoch_is_drawn_once_however_many_slices_are_asked_for() -> None:
    sampler = Own(random.Random())
    order = Drawn(DataSpec(N, 1, drawn=True), Sampling(sampler, 1), 0, lambda epoch, digest: digest)
    taken = [index for one in range(N) for batch in order.batches(4, one) for index in batch]
    assert sorted(taken) == list(range(N))
    assert [order.shape(4, one) for one in range(N)] == [(1, 1)] * N
    assert (sampler.asked, sampler.epoch) == (1, 4)
    order.batches(5, 0), order.batches(4, 0)
    assert sampler.asked == 2, "in asynchronous mode slices of two epochs come in turn"


def test_an_epoch_that_is_shorter_has_shorter_slices_and_slices_without_batches() -> None:
    def order(drop_last: bool) -> Drawn:
        data = DataSpec(10, 4, drop_last, drawn=True)
        return Drawn(data, Sampling(range(6), 4, drop_last), 0, lambda epoch, digest: digest)

    assert [order(False).shape(0, index) for index in range(3)] == [(1, 4), (1, 2), (0, 0)]
    assert [order(True).shape(0, index) for index in range(2)] == [(1, 4), (0, 0)]


def test_an_endless_sampler_and_one_that_others_draw_otherwise_are_refused() -> None:
    class Endless(Own):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 1

    data = DataSpec(N, 4, drawn=True)
    with pytest.raises(errors.DataError, match=r"Endless gives more in epoch 3 than the 20 of its len"):
        Drawn(data, Sampling(Endless(None), 4), 0, lambda epoch, digest: digest).batches(2, 0)
    with pytest.raises(errors.DataError, match=r"Own gives another order of samples in epoch 1 here"):
        Drawn(data, Sampling(Own(None), 4), 0, lambda epoch, digest: digest + 1).batches(0, 0)
