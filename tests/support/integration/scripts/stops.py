"""Trains a linear model; the worker of rank 1 stops in its third slice, in the way that is asked for."""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paramserver as ps

SAMPLES, BATCH, EPOCHS = 64, 2, 12
# Reads of the data set before it hangs: the third slice of a worker.
READS = 2 * BATCH


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Hangs when told to."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(SAMPLES, 4, generator=numbers), torch.randn(SAMPLES, 2, generator=numbers)
        self.reads = 0
        self.hangs_at = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        if self.reads == self.hangs_at + 1:
            print("stops now", flush=True)
            time.sleep(3600.0)
        return self.x[index], self.y[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["not", "loader", "gil"], default="not")
    parser.add_argument("--seconds", type=int, default=4, help="how long to hold the interpreter's lock")
    parser.add_argument("--hurry", type=Path, help="slices take their time until this file exists")
    args = parser.parse_args()
    ctx = ps.init()
    torch.manual_seed(3)
    data = Points()
    model: nn.Module = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))
    if ctx.rank == 1 and args.how == "loader":
        data.hangs_at = READS
    slices = 0
    for _ in ctx.epochs(EPOCHS):
        for x, y in loader:
            slices += 1
            (model(x) - y).square().mean().backward()
            if ctx.rank == 1 and slices == 3:
                print("is in its third slice", flush=True)
                if args.how == "gil":
                    print("stops now", flush=True)
                    ctypes.PyDLL(None).sleep(args.seconds)
            if args.hurry is not None and not args.hurry.exists():
                time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()
    ctx.close()


if __name__ == "__main__":
    main()
