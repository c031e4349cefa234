"""Twelve steps of a small model: `small.py [--ledger] [--epochs N] [--pace SECONDS [--until FILE]] [--history FOLDER]`.

Adam on a linear layer. With --ledger there is only a tensor with one number per sample, to which each epoch adds
exactly 1 for each sample that counts: its bits do not depend on the order, so asynchronous runs can be compared, too.
With --history each worker writes down all versions that it computes with, for `tests/support/faults/history.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

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


class History:
    """The versions that this worker computes with, a line each."""

    def __init__(self, ctx: ps.Context, model: nn.Module, folder: Path, began: float) -> None:
        self._ctx, self._tensors = ctx, dict(model.named_parameters())
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"worker-{ctx.rank}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._file.write(f"{began}\n")
        self._last: tuple[int, list[int]] = (-1, [])

    def see(self) -> None:
        """Take down the weights at hand, if they are new. All of them have arrived."""
        engine = self._ctx.engine
        now = engine.shards.links.timeline, list(engine.weights.versions)
        if now == self._last:
            return
        self._last = now
        digests, sums = [], []
        plan = engine.shards.plan
        for shard in range(plan.shards):
            content, total = hashlib.sha256(), 0.0
            for chunk in plan.chunks_of(shard):
                for piece in chunk.pieces:
                    flat = self._tensors[plan.layout.tensors[piece.tensor].name].detach().reshape(-1)
                    part = flat[piece.tensor_start : piece.tensor_start + piece.elements]
                    content.update(part.numpy().tobytes())
                    total += float(part.sum())
            digests.append(content.hexdigest()[:16])
            sums.append(total)
        most = max(float(tensor.detach().max()) for tensor in self._tensors.values())
        self._file.write(json.dumps([time.time(), *now, digests, sums, most]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a slice takes at least")
    parser.add_argument("--until", type=Path, help="a file that ends the pace once it exists")
    parser.add_argument("--history", type=Path, help="a folder for what the workers see")
    args = parser.parse_args()

    ctx, began = ps.init(), time.time()
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 8), torch.arange(SAMPLES))
    small = Ledger() if args.ledger else Small()
    if args.ledger:
        rule: torch.optim.Optimizer = torch.optim.SGD(small.parameters(), lr=1.0)
    else:
        rule = torch.optim.Adam(small.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(small, rule, DataLoader(data, batch_size=BATCH, shuffle=True))
    history = History(ctx, small, args.history, began) if args.history else None
    for _ in ctx.epochs(args.epochs):
        for x, y, index in loader:
            loss = model.loss(x, y, index)
            if history is not None:
                history.see()
            loss.backward()
            if args.pace and not (args.until and args.until.exists()):
                time.sleep(args.pace)
            optimizer.step()
            optimizer.zero_grad()
            ctx.log(loss=loss)
    ctx.close()


if __name__ == "__main__":
    main()
