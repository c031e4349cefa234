"""Twelve steps of a small model: `small.py [--ledger] [--epochs N] [--pace SECONDS]`.

Adam on a linear layer. With --ledger there is only a tensor with one number per sample, to which each epoch adds
exactly 1 for each sample that counts: its bits do not depend on the order, so asynchronous runs can be compared, too.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

# 24 slices: with four in a step, six steps an epoch.
SAMPLES, BATCH = 48, 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def loss(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


class Ledger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def loss(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return -self.seen[index].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a slice takes at least")
    args = parser.parse_args()

    ctx = ps.init()
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 8), torch.arange(SAMPLES))
    small = Ledger() if args.ledger else Small()
    if args.ledger:
        rule: torch.optim.Optimizer = torch.optim.SGD(small.parameters(), lr=1.0)
    else:
        rule = torch.optim.Adam(small.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(small, rule, DataLoader(data, batch_size=BATCH, shuffle=True))
    for _ in ctx.epochs(args.epochs):
        for x, y, index in loader:
            loss = model.loss(x, y, index)
            loss.backward()
            if args.pace:
                time.sleep(args.pace)
            optimizer.step()
            optimizer.zero_grad()
            ctx.log(loss=loss)
    ctx.close()


if __name__ == "__main__":
    main()
