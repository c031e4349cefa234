"""Training functions for jobs on Ray, one of which trains slowly until a file exists; the processes of such a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps


def train(said: str, enough: str) -> None:
    """Train a small model; each batch is a line in ``said`` with the pid. Hurries when the file ``enough`` is there."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(256, 6), torch.randn(256, 1))
    context = ps.init()
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = context.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for _ in context.epochs(60):
        for x, y in loader:
            with open(said, "a") as file:
                file.write(f"{os.getpid()}\n")
            if not os.path.exists(enough):
                time.sleep(0.1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def train_function(epochs: int) -> None:
    """A script, for the examples of docstrings."""
    with ps.init() as ctx:
        model: Any = nn.Linear(4, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(TensorDataset(torch.ones(32, 4)), 8)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(epochs):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()


def processes(job: str) -> dict[int, str]:
    """Roles of the running processes of a job, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            argv = path.joinpath("cmdline").read_bytes().split(b"\0")
            environ = path.joinpath("environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PARAMSERVER_CLUSTER__JOB={job}".encode() in environ and argv[1:4] == [b"-m", b"paramserver", b"start"]:
            found[int(path.name)] = argv[4].decode()
    return found


def wait_until(true: Callable[[], object], what: str, timeout_s: float = 300.0) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)
