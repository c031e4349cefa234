"""`nn.SyncBatchNorm` over the slices of a step: the numbers of BatchNorm over the whole step, with the same bits always."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, train
from tests.support.cluster.programs import CLASSES, FEATURES, Program, dataset, fill, sgd
from tests.support.cluster.reference import slices_of_steps

# 5 slices: of the last step of an epoch of 2 slices a step, one slice is left, and it has 3 samples.
SAMPLES, BATCH, EPOCHS = 35, 8, 3
ON = {"training__sync_batchnorm": True}


class Net(nn.Module):
    """Two layers of BatchNorm, one of them in the middle of a convolution, one called twice, one without weights."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.norm = nn.BatchNorm1d(12)
        self.conv = nn.Conv1d(3, 5, 3)
        self.bare = nn.BatchNorm1d(5, momentum=None, affine=False)
        self.last = nn.Linear(10, CLASSES)
        fill(self).to(dtype)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.norm(self.first(x)))
        h = torch.tanh(self.norm(h * h - h))
        return self.last(torch.relu(self.bare(self.conv(h.view(-1, 3, 4)))).flatten(1))


def synced(dtype: torch.dtype = torch.float64) -> nn.Module:
    found: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(Net(dtype))
    return found


def program(dtype: torch.dtype = torch.float64, each: Any = None) -> Program:
    return Program(dataset(SAMPLES, dtype), BATCH, EPOCHS, lambda: synced(dtype), sgd, each=each)


def trained(workers: int, servers: int, slices: int, dtype: torch.dtype = torch.float64, **options: Any) -> Outcome:
    return train(program(dtype), workers, servers, ON, slices_per_step=slices, **options)


@cache
def quiet(slices: int) -> tuple[str, str, str]:
    return trained(slices, 1, slices).digests


@cache
def whole(slices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What one process with plain BatchNorm comes to, with the batches of all slices of a step as one batch."""
    model = Net(dtype)
    optimizer = sgd(model.parameters())
    for batches in slices_of_steps(dataset(SAMPLES, dtype), BATCH, slices, EPOCHS):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=str)
def test_the_numbers_are_those_of_batch_norm_over_the_whole_step(slices: int, dtype: torch.dtype, bound: float) -> None:
    outcome = trained(slices, 2, slices, dtype)
    for name, value in whole(slices, dtype).items():
        torch.testing.assert_close(outcome.tensor(name).to(value.dtype), value, rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 2)])
def test_the_bits_do_not_depend_on_who_computes_the_slices(workers: int, servers: int) -> None:
    assert trained(workers, servers, 3).digests == quiet(3)


def test_one_slice_is_plain_batch_norm(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: Net(torch.float32), sgd)
    assert train(program(torch.float32), 1, 1, ON).digests[0] == train(plain, 1, 1).digests[0]
