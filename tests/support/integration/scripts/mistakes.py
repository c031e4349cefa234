"""One mistake of a user after the other: `mistakes.py KIND`."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps


def main() -> None:
    kind = sys.argv[1]
    ctx = ps.init()
    samples = 0 if kind == "empty" else 64
    data = TensorDataset(torch.randn(samples, 4), torch.zeros(samples, dtype=torch.int64))
    loader = DataLoader(data, batch_size=8, shuffle=kind != "empty")
    width = 8 + ctx.rank if kind == "different" else 8
    model: nn.Module = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "no-parameters":
        model = nn.Flatten()
    if kind == "unsupported":
        optimizer = torch.optim.LBFGS(model.parameters())
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(1):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if kind == "not-finite" and ctx.version == 2:
                loss = loss * torch.nan
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    ctx.close()


if __name__ == "__main__":
    main()
