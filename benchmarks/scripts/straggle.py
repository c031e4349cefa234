"""The training that `benchmarks.straggle` measures: a small network whose compute is mostly a sleep.

Started by `paramserver run` it trains as a worker of a cluster, with ``--ddp`` by torchrun as a rank of PyTorch's
DistributedDataParallel, with the same model, data, optimizer and global batch. The first rank writes how long a step
took it, without the first ones.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.scripts.clock import Clock

SLICES, BATCH, FEATURES, CLASSES = 16, 8, 64, 10


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def data(steps: int) -> TensorDataset:
    """One epoch of so many steps."""
    numbers = torch.Generator().manual_seed(2)
    samples = steps * SLICES * BATCH
    x = torch.randn(samples, FEATURES, generator=numbers)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=numbers))


def compute(model: nn.Module, batch: list[Tensor], seconds: float, part: float = 1.0) -> None:
    """The compute of one slice: adds ``part`` of its gradient to the present gradient."""
    time.sleep(seconds)
    x, y = batch
    (F.cross_entropy(model(x), y) * part).backward()  # type: ignore[no-untyped-call]


def ours(args: argparse.Namespace) -> None:
    import paramserver as ps

    clock = Clock(args.skip)
    with ps.init() as ctx:
        model = network()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = DataLoader(data(args.steps), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        seconds = args.slice_s * (args.slower if ctx.rank == ctx.world_size - 1 else 1.0)
        for _ in ctx.epochs(1):
            for batch in loader:
                clock.at(ctx.version)
                compute(model, batch, seconds)
                optimizer.step()
                optimizer.zero_grad()
        clock.at(ctx.version)
        if ctx.rank == 0:
            args.out.write_text(json.dumps(clock.seconds()))


def ddp(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    clock = Clock(args.skip)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = data(args.steps)
    loader = iter(DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples, ranks, rank, seed=1)))
    seconds = args.slice_s * (args.slower if rank == ranks - 1 else 1.0)
    mine = SLICES // ranks
    for step in range(args.steps):
        clock.at(step)
        with model.no_sync():
            for _ in range(mine - 1):
                compute(model, next(loader), seconds, 1 / mine)
        compute(model, next(loader), seconds, 1 / mine)
        optimizer.step()
        optimizer.zero_grad()
    clock.at(args.steps)
    if rank == 0:
        args.out.write_text(json.dumps(clock.seconds()))
    dist.barrier()  # no rank hangs up while another rank still talks
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="as a rank of torchrun")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    parser.add_argument("--slice-s", type=float, required=True, help="the time of a slice, in seconds")
    parser.add_argument("--slower", type=float, required=True, help="how many times as long it takes the last rank")
    parser.add_argument("--out", type=Path, required=True, help="seconds per step, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (ddp if args.ddp else ours)(args)


if __name__ == "__main__":
    main()
