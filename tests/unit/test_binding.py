"""What a model yields is gathered on a device as it is in main memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paramserver.wire.messages import plan_of
from paramserver.worker.flat import FlatSpace, PartialSum
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
