"""For `benchmarks/load.py`: samples take time to read, and steps take time to compute. Both sleep."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import paramserver as ps

BATCH, STEPS, WARM = 4, 40, 8


class Slow(Dataset[torch.Tensor]):
    """Reading a sample takes a while, as from a disk or over a network."""

    def __init__(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((8,), float(index))


def main() -> None:
    """Writes the median time of a step of this worker, in seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--read-s", type=float, required=True, help="of a batch")
    parser.add_argument("--compute-s", type=float, required=True)
    parser.add_argument("--slices", type=int, default=1, help="of a step, of all workers")
    parser.add_argument("--plain", action="store_true", help="torch alone")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    model: Any = torch.nn.Linear(8, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-9)
    data = Slow(STEPS * BATCH * given.slices, given.read_s / BATCH)
    loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=given.processes)
    ctx = None if given.plain else ps.init()
    if ctx is not None:
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    ends = []
    for x in loader:
        time.sleep(given.compute_s)
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    steps = [after - before for before, after in zip(ends[WARM:], ends[WARM + 1 :], strict=False)]
    if ctx is None or ctx.rank == 0:
        Path(given.out).write_text(str(median(steps)))
    if ctx is not None:
        ctx.close()


if __name__ == "__main__":
    main()
