"""A training whose slices take as long as simulated ones: it sleeps for what the stragglers of the simulator draw."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps
from paramserver.simulate.parts.stragglers import draws, parse

BATCH, FEATURES = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, required=True, help="of the whole training")
    parser.add_argument("--slice-s", type=float, required=True, help="what a slice takes on average")
    parser.add_argument("--straggler", required=True, help="as of `paramserver simulate`")
    parser.add_argument("--wide", type=int, default=256, help="units of the hidden layer")
    parser.add_argument("--out", type=Path, required=True, help="what the first worker saw, as JSON")
    args = parser.parse_args()
    torch.manual_seed(1)
    with ps.init() as ctx:
        model: nn.Module = nn.Sequential(nn.Linear(FEATURES, args.wide), nn.ReLU(), nn.Linear(args.wide, 10))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        samples = args.slices * BATCH
        data = TensorDataset(torch.randn(samples, FEATURES), torch.randint(0, 10, (samples,)))
        loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        factors = draws([parse(args.straggler)], ctx.rank, ctx.world_size, 0)
        seen: dict[int, float] = {}
        drawn = took = 0.0
        for _ in ctx.epochs(1):
            for x, y in loader:
                seen.setdefault(ctx.version, time.monotonic())
                factor, begin = next(factors), time.monotonic()
                time.sleep(args.slice_s * factor)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                drawn, took = drawn + factor, took + time.monotonic() - begin
                optimizer.step()
                optimizer.zero_grad()
        if ctx.rank == 0:
            args.out.write_text(json.dumps({"seen": seen, "compute_s": took / drawn}))


if __name__ == "__main__":
    main()
