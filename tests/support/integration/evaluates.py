"""Trains with a sampler that draws from torch's own generator, and evaluates on all workers; one may be killed.

Arguments: a directory for results, and the rank of the worker that kills itself in the second evaluation (-1: none).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import paramserver as ps

EPOCHS = 3


def main() -> None:
    """Writes what was gathered in each epoch, and marks the kill."""
    out, victim = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    x = torch.randn(60, 8)
    y = (x[:, 0] > 0).long()
    ctx = ps.init()
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(x, y)
    loader: Any = DataLoader(data, 4, sampler=WeightedRandomSampler([1.0, 2.0] * 30, 50))
    test: Any = DataLoader(data, 3)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    found = []
    for epoch in ctx.epochs(EPOCHS):
        model.train()
        for features, classes in loader:
            loss: Any = F.cross_entropy(model(features), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for number, (features, classes) in enumerate(ctx.evaluate(test)):
                if epoch == 1 and victim >= 0:
                    if ctx.rank == victim and number == 1:
                        (out / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    while ctx.rank != victim and not (out / "killed").exists():
                        time.sleep(0.01)  # until the other worker has leased batches, and is gone
                scores = model(features)
                ctx.gather({"loss": float(F.cross_entropy(scores, classes, reduction="sum")), "of": len(classes)})
        found.append(ctx.gathered)
    if ctx.rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    ctx.close()


if __name__ == "__main__":
    main()
