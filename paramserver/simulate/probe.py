"""A job of one worker that computes almost nothing: the time of a step is the time of its calls and bytes.

Started by a calibration as `paramserver run probe.py -- FILE PARAMETERS STEPS`; writes the seconds per step, without
computing, to FILE.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

SKIPPED = 10
# Seconds of a pause in place of computing. After a pause a call takes longer than among many other calls.
PAUSE_S = 0.01


class Weights(nn.Module):
    """A model of so many parameters, whose gradient is a number times ones."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: any shape. Returns a scalar."""
        return x.sum() * self.weights.sum()


def main() -> None:
    """Train one epoch."""
    path, params, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with ps.init() as ctx:
        model: nn.Module = Weights(params)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.ones(SKIPPED + steps, 1)))
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        begun: list[float] = []
        computed: list[float] = []
        for _ in ctx.epochs(1):
            for (batch,) in loader:
                begun.append(time.perf_counter())
                time.sleep(PAUSE_S)
                model(batch).backward()
                computed.append(time.perf_counter() - begun[-1])
                optimizer.step()
                optimizer.zero_grad()
        besides = [after - before - own for (before, after), own in zip(pairwise(begun), computed, strict=False)]
        path.write_text(str(median(besides[SKIPPED:])))


if __name__ == "__main__":
    main()
