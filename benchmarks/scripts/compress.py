"""Trains two wide layers on the digits, as a worker of a cluster; rank 0 writes seconds per step and the final loss.

The loss is that of all training samples on the weights that the worker has at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.digits import digits, network, optimizer_of


def main() -> None:
    import paramserver as ps

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples in a slice")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    parser.add_argument("--out", type=Path, required=True, help="file for the facts of rank 0, as JSON")
    args = parser.parse_args()
    with ps.init() as ctx:
        data = digits()
        model = network(args.hidden)
        loader = ctx.prepare(DataLoader(data, batch_size=args.batch, shuffle=True))
        model, optimizer = ctx.prepare(model, optimizer_of(model))
        began: dict[int, float] = {}
        for _ in ctx.epochs(args.epochs):
            for x, y in loader:
                began.setdefault(ctx.version, time.monotonic())
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        began.setdefault(ctx.version, time.monotonic())
        if ctx.rank == 0:
            with torch.no_grad():
                final = F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
            # In some steps this rank has no slice.
            known = [step for step in range(args.skip, max(began)) if step in began and step + 1 in began]
            steps = [began[step + 1] - began[step] for step in known]
            args.out.write_text(json.dumps({"step_s": steps, "loss": final, "steps": max(began)}))


if __name__ == "__main__":
    main()
