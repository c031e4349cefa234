"""A script with things to do at its end: a table that it has not closed, an exit function: `ends.py HOW`.

"open": it ends while iterators of the prepared loader are open. "code": it ends with code 7. "stay": it trains until a
signal comes, saves at a KeyboardInterrupt, and then does not end by itself.
"""

from __future__ import annotations

import atexit
import csv
import gzip
import os
import sys
import threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

how = sys.argv[1]
table = open("table.csv", "w", newline="")  # noqa: SIM115  # it stays open
csv.writer(table).writerows([["a", "b"], [1, 2]])
packed = gzip.open("packed.gz", "wt")  # noqa: SIM115
packed.write("packed\n")
atexit.register(Path("exit").write_text, "ran")
if how == "code":
    sys.exit(7)

ctx = ps.init()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=8))


def step(x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


if how == "open":
    evaluation = ctx.evaluate(DataLoader(data, batch_size=8))
    next(evaluation)
    epochs = ctx.epochs(3)
    next(epochs)
    batches = iter(loader)
    step(*next(batches))
    print("the script has come to its end")
else:
    try:
        while True:
            for batch in loader:
                step(*batch)
                print("trains", os.getpid(), flush=True)
    except KeyboardInterrupt:
        torch.save(ctx.state_dict(), "saved.pt")
        print("saved", flush=True)
        threading.Event().wait()
