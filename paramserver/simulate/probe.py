"""A job of one worker that computes next to nothing: what is left of a step is what its calls cost.

Started by a calibration as `paramserver run probe.py -- FILE`; writes the seconds per step, without computing, to FILE.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

STEPS, SKIPPED, FEATURES = 120, 20, 16


def main() -> None:
    """Train one epoch."""
    with ps.init() as ctx:
        model: nn.Module = nn.Linear(FEATURES, 1)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.ones(STEPS, FEATURES)))
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        begun: list[float] = []
        computed: list[float] = []
        for _ in ctx.epochs(1):
            for (batch,) in loader:
                begun.append(time.perf_counter())
                model(batch).sum().backward()
                computed.append(time.perf_counter() - begun[-1])
                optimizer.step()
                optimizer.zero_grad()
        steps = len(begun) - 1 - SKIPPED
        seconds = begun[-1] - begun[SKIPPED] - sum(computed[SKIPPED:-1])
        Path(sys.argv[1]).write_text(str(seconds / steps))


if __name__ == "__main__":
    main()
