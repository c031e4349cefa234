"""A few steps of a linear model: `tiny.py`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

SAMPLES, BATCH, EPOCHS = 256, 4, 2


def main() -> None:
    ctx = ps.init()
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 2))
    model: nn.Module = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))
    for _ in ctx.epochs(EPOCHS):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ctx.log(loss=loss)
    ctx.close()


if __name__ == "__main__":
    main()
