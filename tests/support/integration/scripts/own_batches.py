"""A loop without a loader, which draws its batches from the generators of the process: `own_batches.py SLICES`."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import paramserver as ps


def main() -> None:
    slices = int(sys.argv[1])
    ctx = ps.init()
    x, y = torch.randn(400, 6), torch.randint(3, (400,))
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in range(slices):
        rows = torch.randint(400, (8,))
        noise = torch.from_numpy(np.random.standard_normal((8, 6)).astype(np.float32))
        loss = F.cross_entropy(model(x[rows] + 0.1 * noise), y[rows])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    ctx.close()


if __name__ == "__main__":
    main()
