"""What a model yields is gathered on a device as it is in main memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paramserver.wire.messages import plan_of
from paramserver.worker.flat import FlatSpace, PartialSum, put, put_all
from paramserver.worker.gradients.backward import _all_same
from paramserver.worker.script.binding import ModelBinding


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "with infinities"])
def test_all_buffers_at_once_are_as_one_by_one(odd: bool) -> None:
    """Some of them change, one of them in whole numbers, some do not; an infinity that stays is no change."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    idle = model[2]
    assert isinstance(idle, nn.BatchNorm1d)
    if odd:
        idle.running_mean.fill_(math.inf)  # type: ignore[union-attr]
        idle.running_var[0] = math.nan  # type: ignore[index]
    binding = ModelBinding(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    plan = plan_of(binding.message(0), 1)
    binding.load(binding.space(plan))
    model[1](model[0](torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))).sum().backward()
    if odd:
        idle.running_mean[0] = 1.0  # type: ignore[index]
    single, together = (PartialSum(FlatSpace(plan.layout, torch.device("cpu"))) for _ in range(2))
    binding.gather(single, 3)
    gradients = set(binding._trained)
    binding._gather_buffers(together, 3)
    assert together.used == single.used - gradients
    assert len(together.used) == (4 if odd else 3)
    for index in together.used:
        assert torch.equal(together.space.view(index), single.space.view(index))
    together.settle()
    assert not any(together.space.view(b.index).any() for b in binding._buffers if b.index not in together.used)


@pytest.mark.parametrize("unscale", [1.0, 2.0**-7], ids=["plain", "scaled"])
def test_all_gradients_at_once_are_as_one_by_one(unscale: float) -> None:
    """Of several types and shapes; one of them is not contiguous."""
    numbers = torch.Generator().manual_seed(1)
    kinds = [(torch.float32, (3, 5)), (torch.float16, (7,)), (torch.bfloat16, ()), (torch.float32, (0,))]
    gradients = [torch.randn(shape, generator=numbers).to(dtype) for dtype, shape in kinds]
    gradients.append(torch.randn(4, 6, generator=numbers).t())
    places = [torch.full(gradient.shape, math.nan) for gradient in gradients]
    wanted = [place.clone() for place in places]
    put_all(places, gradients, 3, unscale)
    for place, gradient in zip(wanted, gradients, strict=True):
        put(place, gradient, 3, unscale)
    assert all(map(torch.equal, places, wanted))
    put_all([], [], 3)


def test_buffers_of_every_type_are_gathered_on_a_device() -> None:
    """As one by one: those that change, those that do not, and one without numbers."""
    kinds = (torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
    model = nn.Linear(2, 2)
    for kind in kinds:
        name = str(kind).removeprefix("torch.")
        for change in ("still", "moves"):
            model.register_buffer(f"{name}_{change}", torch.tensor([0.0, 1.0]).to(kind))
    model.register_buffer("empty", torch.zeros(0))
    binding = ModelBinding(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    plan = plan_of(binding.message(0), 1)
    binding.load(binding.space(plan))
    for name, buffer in model.named_buffers():
        if name.endswith("moves"):
            buffer.copy_(torch.tensor([1.0, 1.0]).to(buffer.dtype))
    single, together = (PartialSum(FlatSpace(plan.layout, torch.device("cpu"))) for _ in range(2))
    binding.gather_buffers(single, 5)
    binding._gather_buffers(together, 5)
    assert len(single.used) == len(kinds)
    assert together.used == single.used
    for index in single.used:
        assert torch.equal(together.space.view(index), single.space.view(index))


@pytest.mark.parametrize("change", ["none", "a bit", "a NaN", "a sign of zero"])
def test_gradients_on_a_device_are_compared_at_once(change: str) -> None:
    numbers = torch.Generator().manual_seed(1)
    kinds = [(torch.float32, (3, 5)), (torch.float16, (7,)), (torch.float64, (2,)), (torch.float32, (0,))]
    gradients = [torch.randn(shape, generator=numbers).to(dtype) for dtype, shape in kinds]
    gradients[2][1] = 0.0
    places = [torch.empty(g.shape, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    put_all(places, gradients, 4)
    if change == "a bit":
        gradients[0].view(torch.int32)[2, 4] ^= 1
    elif change == "a NaN":
        gradients[1][0] = places[1][0] = math.nan
    elif change == "a sign of zero":
        gradients[2][1] = -0.0
    assert _all_same(list(zip(places, gradients, strict=True)), 4) == (change in ("none", "a sign of zero"))
    assert _all_same([], 3)
