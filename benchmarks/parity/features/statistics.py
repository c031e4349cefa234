"""Rows of docs/parity.md about layers with statistics over all slices of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parity.features.loops import Normed
from benchmarks.parity.rows import PLAIN, RANKS, ROUNDING, Row, Tensors
from benchmarks.parity.sides import Data, Side
from benchmarks.parity.training import EPOCHS, Training, flat, sgd
from tests.support.cluster.programs import dataset

# 15 batches of 4: the last step of an epoch has one slice, of 3 samples.
DATA = Data(dataset(59))


def synced() -> nn.Module:
    """The model with SyncBatchNorm in place of BatchNorm."""
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    found: nn.Module = convert(Normed())
    return found


def over_slices(side: Side) -> Tensors:
    """SyncBatchNorm in slices. The reference is BatchNorm, which gets the batches of all slices of a step as one."""
    if side.ours:
        return Training(synced, sgd, DATA)(side)
    model: Any = Normed()
    optimizer = sgd(model.parameters())
    for epoch in range(EPOCHS):
        for step in DATA.steps(RANKS, epoch):
            batches: list[tuple[Tensor, Tensor]] = [batch for _, mine in step for batch in mine]
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return flat({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


ROWS = [
    Row(
        "`SyncBatchNorm` over two slices, the last slice of an epoch alone; the reference has BatchNorm over both",
        PLAIN,
        over_slices,
        5 * ROUNDING,
        settings={"training.sync_batchnorm": True},
    ),
]
