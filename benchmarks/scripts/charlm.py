"""The training that `benchmarks.charlm` measures: the model of `workers/charlm.py` with 10 M parameters.

Started by `paramserver run` it trains as a worker of a cluster, with ``--ddp`` by torchrun as a rank of PyTorch's
DistributedDataParallel: the same model, initial weights, batches in the same order, and update. The first rank writes
seconds per step, without the first steps, and the loss after the last step.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from benchmarks.scripts.clock import Clock

charlm: Any = import_module("workers.charlm")


def network(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(1)
    made: nn.Module = charlm.CharLM(*charlm.SIZES[args.size], args.context)
    return made


def optimizer_of(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(charlm.groups(model, 0.1), lr=3e-4, betas=(0.9, 0.95), fused=fused)


def data(args: argparse.Namespace) -> Subset[Any]:
    """Just so many pieces of the standard library that all steps are full."""
    windows = charlm.Windows(charlm.standard_library(), args.context)
    pieces = args.steps * args.ranks * args.accumulate * args.batch
    return Subset(windows, range(0, pieces * (len(windows) // pieces), len(windows) // pieces))


def write(args: argparse.Namespace, clock: Clock, model: nn.Module, samples: Subset[Any]) -> None:
    """With the loss on the first samples."""
    x, y = (torch.stack(parts) for parts in zip(*(samples[i] for i in range(16)), strict=True))
    with torch.no_grad():
        loss = charlm.loss_of(model, x, y, False).item()
    args.out.write_text(json.dumps({"step_s": clock.seconds(), "loss": loss}))


def ours(args: argparse.Namespace) -> None:
    import paramserver as ps

    clock = Clock(args.skip)
    with ps.init() as ctx:
        model = network(args)
        optimizer = optimizer_of(model, fused=False)  # the servers' own is fused
        samples = data(args)
        loader: Any = DataLoader(samples, batch_size=args.batch)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=args.accumulate)
        run: Any = torch.compile(model) if args.compile else model
        for _ in ctx.epochs(1):
            for x, y in loader:
                clock.at(ctx.version)
                (charlm.loss_of(run, x, y, False) / args.accumulate).backward()
                if not ctx.step_due:
                    continue
                ctx.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
        clock.at(ctx.version)
        if ctx.rank == 0:
            write(args, clock, model, samples)


def ddp(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    clock = Clock(args.skip)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bare = network(args)
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True, broadcast_buffers=False)
    run: Any = torch.compile(model) if args.compile else model
    optimizer = optimizer_of(model, fused=True)
    samples = data(args)
    slice_size = args.batch * args.accumulate
    firsts = range(rank * slice_size, len(samples), slice_size * ranks)
    mine = [at for first in firsts for at in range(first, first + slice_size)]
    for number, (x, y) in enumerate(DataLoader(samples, batch_size=args.batch, sampler=mine)):
        clock.at(number // args.accumulate)
        due = (number + 1) % args.accumulate == 0
        with nullcontext() if due else model.no_sync():
            (charlm.loss_of(run, x, y, False) / args.accumulate).backward()
        if due:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    clock.at(args.steps)
    if rank == 0:
        write(args, clock, bare, samples)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="as a rank of torchrun")
    parser.add_argument("--compile", type=int, required=True, help="1: with torch.compile")
    parser.add_argument("--size", required=True, help="of workers/charlm.py")
    parser.add_argument("--context", type=int, required=True, help="bytes that the model sees at once")
    parser.add_argument("--ranks", type=int, required=True, help="how many train together")
    parser.add_argument("--batch", type=int, required=True, help="pieces of text in a batch")
    parser.add_argument("--accumulate", type=int, required=True, help="batches of one rank in a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    parser.add_argument("--out", type=Path, required=True, help="seconds per step and final loss, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (ddp if args.ddp else ours)(args)


if __name__ == "__main__":
    main()
