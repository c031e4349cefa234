"""A script that calls ``ctx.load``, and something to load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from tests.support.cluster.programs import Aligned, dataset

SAMPLES, BATCH = 40, 8
cross_entropy: Any = torch.nn.functional.cross_entropy


def adamw(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """Fused, as servers use it: then the bits are the same."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def saved(lr: float = 0.01) -> dict[str, Any]:
    """State dicts of a model and an optimizer that have made three steps by themselves."""
    model = Aligned()
    optimizer = adamw(model.parameters(), lr)
    x, y = dataset(SAMPLES).tensors
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}


def script_loading(at: int, epochs: int = 3, **what: Any) -> Callable[[Context], None]:
    """Loads before the epoch ``at`` of ``epochs`` (-1: right after prepare)."""

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        if at == -1:
            ctx.load(**what)
        for epoch in ctx.epochs(epochs):
            if epoch == at:
                ctx.load(**what)
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    return script
