"""A step without compute: the gradients are there, and only communication and update (SGD) are left.

A worker of a cluster, or with ``--ring`` a rank of gloo that sums with `all_reduce`. Rank 0 writes seconds per step and
a weight after the last step, which is the same on both ways.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts.clock import Clock

RATE = 0.5


class Weights(nn.Module):
    """``megabytes`` of parameters, in tensors of 4 MB."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.ones(1_000_000)) for _ in range(megabytes // 4))

    def ready(self, part: int) -> None:
        """Give every parameter its gradient of this part of the batch."""
        for tensor in self.tensors:
            tensor.grad = torch.full_like(tensor, gradient(part))

    def again(self) -> None:
        """Say that the gradients are those of the next slice, too: without that they would be left of the last one."""
        for tensor in self.tensors:
            tensor.grad = None if tensor.grad is None else tensor.grad.detach()


def gradient(part: int) -> float:
    """Of each weight."""
    return (part + 1) / 1024


def write(args: argparse.Namespace, clock: Clock, weight: float) -> None:
    found = {"step_s": clock.each(), "weight": weight}
    temporary = args.out.with_suffix(".new")
    temporary.write_text(json.dumps(found))
    temporary.replace(args.out)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=RATE)


def ours(args: argparse.Namespace) -> None:
    import paramserver as ps

    clock = Clock(args.skip)
    with ps.init() as ctx:
        model = Weights(args.megabytes)
        parts = TensorDataset(torch.arange(args.steps * args.ranks) % args.ranks)
        _, optimizer, loader = ctx.prepare(model, optimizer_of(args.optimizer, model), DataLoader(parts, batch_size=1))
        part = -1
        for _ in ctx.epochs(1):
            for (wanted,) in loader:
                clock.at(ctx.version)
                if part != int(wanted):  # at the beginning, or if slices have moved
                    part = int(wanted)
                    model.ready(part)
                else:
                    model.again()
                optimizer.step()
        clock.at(ctx.version)
        if ctx.rank == 0:
            write(args, clock, next(model.parameters())[0].item())


def ring(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    clock = Clock(args.skip)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = torch.ones(args.megabytes // 4 * 1_000_000)
    ready = torch.full_like(weights, gradient(rank))
    summed = torch.empty_like(ready)
    optimizer = torch.optim.SGD([weights], lr=RATE, fused=True)
    for step in range(args.steps):
        clock.at(step)
        summed.copy_(ready)  # all_reduce overwrites
        dist.all_reduce(summed)
        weights.grad = summed.div_(ranks)
        optimizer.step()
    clock.at(args.steps)
    if rank == 0:
        write(args, clock, weights[0].item())
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ring", action="store_true", help="as a rank of gloo")
    parser.add_argument("--megabytes", type=int, required=True, help="size of the model")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="of a worker of a cluster")
    parser.add_argument("--out", type=Path, required=True, help="file for the facts of rank 0, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (ring if args.ring else ours)(args)


if __name__ == "__main__":
    main()
