"""The main worker is killed after training, when the other workers have left: `saves.py FILE` appends who saves."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

DEADLINE_S = 30.0


def main() -> None:
    saved = Path(sys.argv[1])
    ctx = ps.init()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for _ in ctx.epochs(1):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    first = not saved.exists()
    if ctx.is_main and first:
        saved.touch()
        deadline = time.monotonic() + DEADLINE_S
        while ctx.world_size > 1:
            assert time.monotonic() < deadline, "the other worker has not left"
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.is_main:
        with saved.open("a") as file:
            file.write(f"rank {ctx.rank} saves\n")
    ctx.close()


if __name__ == "__main__":
    main()
