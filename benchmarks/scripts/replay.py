"""The step that `benchmarks.step_overlap` measures: layers whose compute is a sleep, with gradients of real sizes.

Started by `paramserver run` as a worker of a cluster, with ``--ddp`` by torchrun as a rank of PyTorch's DDP, with
``--alone`` by torchrun, too, to compute without communication. The first rank writes seconds per step, and one weight
after the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts.clock import Clock

# Parameters of each layer, in the order of the forward pass, in thousands: a quarter of the real model.
SHAPES = {
    "ResNet-50": [2, *[18] * 3, *[70] * 4, *[295] * 6, *[1240] * 3, 512],
    "VGG-16": [1, 9, 18, 37, 74, 148, 148, 295, 590, 590, 590, 590, 590, 25690, 4195, 1024],
    "BERT-base": [5960, *[1772] * 12, 148],
    "12 layers": [500] * 12,
}
# Of the time of a step, the rest is the backward pass.
FORWARD = 1 / 3
RATE, GRADIENT = 0.5, 1 / 1024


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: tuple[float, float]) -> Tensor:
        time.sleep(seconds[0])
        ctx.save_for_backward(weight)
        ctx.seconds = seconds[1]
        return x * weight[:1]  # reads it, as layers do

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.full_like(weight, GRADIENT), None


class Layer(nn.Module):
    """Sleeps for as long as its forward and its backward pass take."""

    def __init__(self, parameters: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parameters))
        self.seconds = (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return out


def network(shape: str, seconds: float) -> nn.Module:
    """All layers take equally long, ``seconds`` together."""
    thousands = SHAPES[shape]
    each = seconds / len(thousands)
    return nn.Sequential(*(Layer(1000 * n, FORWARD * each, (1 - FORWARD) * each) for n in thousands))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, clip: Callable[[], None] | None = None) -> None:
    model(x.requires_grad_()).sum().backward()
    if clip is not None:
        clip()
    optimizer.step()
    optimizer.zero_grad()


def write(args: argparse.Namespace, clock: Clock, model: nn.Module, updates: int) -> None:
    """``updates``: how often the weights were changed. They began as 1."""
    weight = next(model.parameters())[0].item()
    wanted = 1 - updates * RATE * GRADIENT
    if not math.isclose(weight, wanted, rel_tol=1e-5):
        raise SystemExit(f"the first weight is {weight} after {updates} updates, and should be {wanted}")
    args.out.write_text(json.dumps({"step_s": clock.seconds()}))


def ours(args: argparse.Namespace) -> None:
    import paramserver as ps

    clock = Clock(args.skip)
    with ps.init() as ctx:
        updates = args.ranks if ctx.mode == "async" else 1  # of a step
        model = network(args.shape, args.compute_s)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        samples = TensorDataset(torch.zeros(args.steps * args.ranks, 1))
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(samples, batch_size=1))
        for _ in ctx.epochs(1):
            for (x,) in loader:
                clock.at(ctx.version // updates)
                step(model, optimizer, x, (lambda: ctx.clip_grad_norm(1e9)) if args.clip else None)
        clock.at(ctx.version // updates)
        if ctx.rank == 0:
            write(args, clock, model, ctx.version)


def ddp(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    clock = Clock(args.skip)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network(args.shape, args.compute_s), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
    for number in range(args.steps):
        clock.at(number)
        step(model, optimizer, torch.zeros(1, 1))
    clock.at(args.steps)
    if dist.get_rank() == 0:
        write(args, clock, model.module, args.steps)
    dist.destroy_process_group()


def alone(args: argparse.Namespace) -> None:
    """Forward and backward pass, which also make the gradients, and their end; no communication, no update."""
    rank = int(os.environ["RANK"])
    clock, model = Clock(args.skip), network(args.shape, args.compute_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(args.steps):
        clock.at(number)
        model(torch.zeros(1, 1).requires_grad_()).sum().backward()
        optimizer.zero_grad()
    clock.at(args.steps)
    if rank == 0:
        write(args, clock, model, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="as a rank of torchrun")
    parser.add_argument("--alone", action="store_true", help="as a rank of torchrun that only computes")
    parser.add_argument("--clip", action="store_true", help="have the servers clip, to a norm that is never reached")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--compute-s", type=float, required=True, help="forward and backward pass together, in seconds")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    parser.add_argument("--out", type=Path, required=True, help="seconds per step and a weight, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (alone if args.alone else ddp if args.ddp else ours)(args)


if __name__ == "__main__":
    main()
