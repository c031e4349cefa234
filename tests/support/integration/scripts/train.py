"""Trains a small classifier on made-up data, and misbehaves if asked to.

The model has BatchNorm and dropout; the data does not divide evenly into slices, nor the slices into steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

SAMPLES, BATCH = 230, 16  # 15 slices, the last one of 6 samples


def build_model(wide: bool = False) -> nn.Sequential:
    """``wide``: of 5.8 MB, so that contributions leave early and weights come in several parts."""
    if wide:
        layers = [nn.Linear(16, 1200), nn.BatchNorm1d(1200), nn.ReLU(), nn.Linear(1200, 1200), nn.ReLU()]
        return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1200, 4))
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))


def make_data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (samples,), generator=generator)
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(7))
    return TensorDataset(centres[y] + 0.7 * torch.randn(samples, 16, generator=generator), y)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, y = make_data(200, seed=2).tensors
    model.eval()
    correct = (model(x).argmax(dim=1) == y).float().mean()
    model.train()
    return float(correct)


def misbehave(how: str, once: Path | None) -> None:
    """``once``: a file that is made by the first one to misbehave; nobody does after that."""
    if once is not None:
        if once.exists():
            return
        once.touch()
    if how == "raise":
        raise RuntimeError("the cat sat on the keyboard")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--wide", action="store_true", help="a model of 5.8 MB")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds a slice takes at least")
    parser.add_argument("--hurry", type=Path, default=None, help="once this file exists there is no pace any more")
    parser.add_argument("--bar", action="store_true", help="draw a progress bar as tqdm does, but none for the end")
    parser.add_argument("--misbehave", default="", help="RANK:VERSION:HOW")
    parser.add_argument("--once", type=Path, default=None, help="only while this file does not exist")
    args = parser.parse_args()
    rank, version, how = (args.misbehave or "-1:-1:").split(":")

    ctx = ps.init()
    model: nn.Module = build_model(args.wide)
    loader = DataLoader(make_data(SAMPLES, seed=1), batch_size=BATCH, shuffle=True, num_workers=args.num_workers)
    loader = ctx.prepare(loader)
    if args.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = None
    if args.optimizer == "adamw":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
        scheduler = ctx.prepare(scheduler)
    model, optimizer = ctx.prepare(model, optimizer)
    told = False
    for _ in ctx.epochs(args.epochs):
        for number, (x, y) in enumerate(loader):
            if args.bar:
                print(f"\rscript's bar: {number}  ", end="", file=sys.stderr, flush=True)
            if not told:
                told = True
                print(f"rank {ctx.rank} of {ctx.world_size} trains with {args.epochs} epochs", flush=True)
            if ctx.rank == int(rank) and ctx.version >= int(version):
                misbehave(how, args.once)
            if args.pace and not (args.hurry and args.hurry.exists()):
                time.sleep(args.pace)
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            ctx.log(loss=loss)
    if ctx.is_main:
        ctx.log(test_accuracy=accuracy(model))
    ctx.close()


if __name__ == "__main__":
    main()
