"""Generators that objects of a script own: which of them are found, and that their seeds follow from the batch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from paramserver.worker.data.generators import generators_of, generators_of_module, seed_generators
from paramserver.worker.data.reading import SliceDataset

GLOBAL = np.random.default_rng(1)
MAKE: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "random": random.Random,
    "numpy": np.random.default_rng,
    "philox": lambda: np.random.Generator(np.random.Philox()),
    "legacy": np.random.RandomState,
}
DRAW: dict[str, Callable[[Any], float]] = {
    "torch": lambda generator: float(torch.rand((), generator=generator)),
    "random": lambda generator: float(generator.random()),
    "numpy": lambda generator: float(generator.random()),
    "philox": lambda generator: float(generator.random()),
    "legacy": lambda generator: float(generator.rand()),
}


class Owner:
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def method(self) -> None:
        pass


class Slotted:
    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def closure_over(thing: Any) -> Callable[[], Any]:
    return lambda: thing


PLACES: dict[str, Callable[[Any], Any]] = {
    "attribute": Owner,
    "slot": Slotted,
    "list": lambda thing: Owner([1, (thing, 2)]),
    "dict": lambda thing: Owner({"a": {"b": thing}}),
    "closure": closure_over,
    "partial": lambda thing: functools.partial(print, file=thing),
    "bound method": lambda thing: Owner(thing).method,
    "default value": lambda thing: Owner(eval("lambda x=thing: x", {"thing": thing})),
    "data sets in data sets": lambda thing: ConcatDataset([Subset(Samples(thing), [0])]),
}


class Samples(Dataset[Any]):
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(self.thing.random())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MAKE)
def test_found_wherever_it_is_kept_and_seeded(kind: str, place: str) -> None:
    generator = MAKE[kind]()
    (found,) = generators_of(PLACES[place](generator))
    assert found is generator
    seed_generators([found], 5)
    first = DRAW[kind](generator)
    assert DRAW[kind](generator) != first
    seed_generators([found], 6)
    assert DRAW[kind](generator) != first
    seed_generators([found], 5)
    assert DRAW[kind](generator) == first


def test_two_generators_draw_different_numbers() -> None:
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    seed_generators([one, other], 5)
    assert one.random() != other.random()


def of_a_global_variable() -> float:
    return float(GLOBAL.random())


def test_global_variables_that_functions_name_are_found_also_in_functions_that_they_call() -> None:
    class Here(Samples):
        def __getitem__(self, index: int) -> float:
            return sum(of_a_global_variable() for _ in range(2))

    assert generators_of(Here(None)) == [GLOBAL]


def test_generators_of_the_process_are_left_out_and_circles_end() -> None:
    owner = Owner([torch.default_generator, np.random.mtrand._rand, random._inst])
    owner.thing.append(owner)
    assert generators_of(owner) == []


def test_a_large_data_set_is_not_looked_through() -> None:
    looked = []

    class Many(list[Any]):
        def __iter__(self) -> Any:
            for one in super().__iter__():
                looked.append(one)
                yield one

    generators_of(Owner(Many(range(100_000))))
    assert len(looked) < 100


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator) + of_a_global_variable()


def test_generators_of_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(noise := Noise()))
    assert [id(one) for one in generators_of_module(model)] == [id(noise.generator), id(GLOBAL)]


def test_a_worker_init_fn_sets_attributes_of_the_data_set_and_not_of_what_stands_for_it() -> None:
    data = Samples(None)
    stands: Any = SliceDataset(data)
    stands.thing = np.random.default_rng(9)  # as get_worker_info().dataset.thing = ... does
    assert stands.thing is data.thing
    assert stands.__getitems__([5, -1, 0]) == stands.__getitems__([5, -1, 0])
    assert stands.__getitems__([5, -1, 0]) != stands.__getitems__([6, -1, 0])


def test_the_data_set_hears_of_the_epoch_of_each_batch() -> None:
    heard: list[int] = []

    class Told(Samples):
        def set_epoch(self, epoch: int) -> None:
            heard.append(epoch)

    stands = SliceDataset(Subset(Told(random), [0, 1]))
    for epoch in (3, 3, 2, -1):
        stands.__getitems__([5, epoch, 0])
    assert heard == [3, 2]
