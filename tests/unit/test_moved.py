"""Batches keep their class on every device, and are not touched on the CPU. The device "meta" stands for a GPU."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch

from paramserver.worker.data.moved import to_device

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Attributes(dict[str, Any]):
    """Its keys are its attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class Synced(OrderedDict[str, Any]):
    """As the outputs of transformers: keys are attributes, and `update` is forbidden."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *values: Any, **more: Any) -> None:
        raise NotImplementedError


class Dots(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Rows(list[Any]):
    title = "rows"


class Point(tuple[Any, ...]):
    def __new__(cls, x: Any, y: Any) -> Point:
        return super().__new__(cls, (x, y))

    unit = "m"


class Named(Pair):
    """A named tuple of the script, with a constructor of its own."""

    def __new__(cls, both: Any) -> Named:
        return super().__new__(cls, both, both)


def batches() -> list[Any]:
    x = torch.ones(2)
    synced = Synced()
    synced["x"] = x
    made = Rows([x])
    made.title = "mine"
    point = Point(x, 1)
    point.unit = "km"
    return [
        *({"x": x}, Attributes(x=x), Dots(x=x), synced, OrderedDict(x=x), defaultdict(lambda: x, x=x)),
        *([x], made, (x, 1), point, Pair(x, 2), Named(x), [{"x": (x,)}], torch.max(torch.ones(2, 2), 0)),
    ]


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)
def test_a_batch_keeps_its_class_and_its_attributes(batch: Any) -> None:
    found = to_device(batch, META)
    assert type(found) is type(batch)
    assert found is not batch
    values = found.values() if isinstance(found, dict) else found
    assert {one.device for one in values if isinstance(one, torch.Tensor)} <= {META}
    before = batch.values() if isinstance(batch, dict) else batch
    assert all(one.device == CPU for one in before if isinstance(one, torch.Tensor)), "the batch itself is as it was"
    if isinstance(batch, Attributes | Dots | Synced):
        assert found.x is found["x"]
    if isinstance(batch, Pair):
        assert found.x.device == META
    if isinstance(batch, defaultdict):
        assert found["new"] is found.default_factory()
    for name in ("title", "unit"):
        assert getattr(found, "__dict__", {}).get(name) == getattr(batch, "__dict__", {}).get(name)


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)
def test_on_the_cpu_a_batch_is_not_touched(batch: Any) -> None:
    assert to_device(batch, CPU) is batch


def test_everything_else_stays_as_it_is() -> None:
    batch = ["text", 1, None, object()]
    assert to_device(batch, META) == batch
