"""Trains a model of 5.8 MB, and waits at some versions until a file appears: the network is then quiet.

The environment says where: MACHINES_GATES, "4:/path/of/file,24:/path/of/another".
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

BATCH, SLICES_PER_STEP, STEPS = 4, 8, 28


def build_model() -> nn.Sequential:
    """The model that is trained."""
    return nn.Sequential(nn.Linear(16, 1200), nn.Tanh(), nn.Linear(1200, 1200), nn.Tanh(), nn.Linear(1200, 4))


def main() -> None:
    """A worker's script."""
    gates = dict(gate.split(":", 1) for gate in os.environ["MACHINES_GATES"].split(","))
    numbers = torch.Generator().manual_seed(1)
    samples = BATCH * SLICES_PER_STEP * STEPS
    data = TensorDataset(
        torch.randn(samples, 16, generator=numbers), torch.randint(0, 4, (samples,), generator=numbers)
    )
    ctx = ps.init()
    model: nn.Module = build_model()
    loader = ctx.prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in ctx.epochs(1):
        for x, y in loader:
            gate = gates.pop(str(ctx.version), None)
            if gate is not None:
                print(f"rank {ctx.rank} is at version {ctx.version}", flush=True)
                while not Path(gate).exists():
                    time.sleep(0.02)
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    ctx.close()


if __name__ == "__main__":
    main()
