"""The training that `benchmarks.start` measures: a layer, a step, and when it was done.

Started by `paramserver run` it trains as a worker of a cluster, with ``--ddp`` by torchrun as a rank of PyTorch's
DistributedDataParallel. Each rank writes a line "seconds pid" after each step; seconds are those of the wall clock.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, BATCH, SLICES = 16, 4, 4, 2000
EPOCHS = 1000


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, CLASSES)


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(2)
    samples = SLICES * BATCH
    x = torch.randn(samples, FEATURES, generator=numbers)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=numbers))


def note(directory: Path, rank: int) -> None:
    """A step is done."""
    with (directory / f"steps.{rank}").open("a") as file:
        file.write(f"{time.time():.6f} {os.getpid()}\n")


def step(model: nn.Module, batch: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    x, y = batch
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def ours(directory: Path, over: Callable[[], bool]) -> None:
    import paramserver as ps

    with ps.init() as ctx:
        model = network()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(1 if over() else EPOCHS):
            for batch in loader:
                step(model, batch, optimizer)
                note(directory, ctx.rank)
                if over():
                    return
                time.sleep(0.01)


def ddp(directory: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = data()
    loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples, ranks, rank, seed=1))
    step(model, next(iter(loader)), optimizer)
    note(directory, rank)
    dist.barrier()  # no rank hangs up while another rank still talks
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="as a rank of torchrun")
    parser.add_argument("--goes-on", action="store_true", help="until the directory has a file named over")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.ddp:
        ddp(args.out)
    else:
        ours(args.out, lambda: not args.goes_on or (args.out / "over").exists())


if __name__ == "__main__":
    main()
