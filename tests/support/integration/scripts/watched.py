"""Learns made-up numbers, slowly enough to be watched; one worker may have a slow data loader."""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paramserver as ps

SAMPLES, BATCH, WIDTH, KINDS = 4096, 16, 64, 10


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points and their kinds. ``load_s``: seconds that each takes."""

    def __init__(self, load_s: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self._points = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._kinds = (self._points @ torch.randn(WIDTH, KINDS, generator=generator)).argmax(dim=1)
        self._load_s = load_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._load_s)
        return self._points[index], self._kinds[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", type=int, default=-1, help="rank of the worker with the slow loader")
    parser.add_argument("--slice-s", type=float, default=0.1, help="seconds that a slice takes to compute")
    args = parser.parse_args()
    ctx = ps.init()
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, KINDS))
    # Samples of a slice are loaded one after the other.
    loader = DataLoader(Numbers(0.05 if ctx.rank == args.slow else 0.001), batch_size=BATCH)
    model, optimizer, loader = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in ctx.epochs(100):
        for points, kinds in loader:
            found = model(points)
            loss = F.cross_entropy(found, kinds)
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(args.slice_s)
            optimizer.step()
            optimizer.zero_grad()
            ctx.log(loss=float(loss.detach()), accuracy=float((found.argmax(dim=1) == kinds).float().mean()))
    ctx.close()


if __name__ == "__main__":
    main()
