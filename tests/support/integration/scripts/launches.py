"""A program that launches jobs: one of them loses a worker, in another one a worker fails."""

from __future__ import annotations

import atexit
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # with the threads of this process
unwritten = open("unwritten.txt", "w")  # noqa: SIM115  # the workers are not to write it, too
unwritten.write("once\n")
atexit.register(print, "the program has ended")


def train(how: str) -> dict[str, Any]:
    ctx = ps.init()
    model = torch.nn.Linear(4, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=8))
    for epoch in ctx.epochs(3):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 1 and ctx.rank == 1 and how == "dies" and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if epoch == 1 and how == "fails":
                raise ValueError("a mistake")
    return {"how": how, "weights": model.weight.detach()}


for how in ("well", "dies"):
    job = ps.launch(train, (how,), workers=2)
    print(job.value["how"], job.value["weights"].shape, job.summary["weights_sha256"], flush=True)
try:
    ps.launch(train, kwargs={"how": "fails"}, workers=1)
except ps.errors.JobFailedError as error:
    print("failed:", error)
