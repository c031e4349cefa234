"""A training on two sides, for the scripts of `benchmarks.train` and `benchmarks.charlm`.

Started by `paramserver run` a script trains as a worker of a cluster, with ``--ddp`` by torchrun as a rank of PyTorch's
DistributedDataParallel: the same model, initial weights, batches in the same order, and update. The first rank writes
seconds per step, without the first ones, and the loss after the last one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.scripts.clock import Clock


@dataclass(frozen=True)
class Training:
    """What both sides train."""

    network: Callable[[], nn.Module]
    # Gets the model, and whether the update is to be fused: the servers' own always is.
    optimizer: Callable[[nn.Module, bool], torch.optim.Optimizer]
    # Gets how many samples all ranks take in a step; so many times the steps fill each step.
    data: Callable[[int], Any]
    # Of a model on inputs and targets.
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    # The loss at the end is that on so many of the first samples.
    judged: int
    # Batches of one rank in a step.
    accumulate: int = 1
    # The global norm of a step's gradient; 0: it is not clipped.
    clip_norm: float = 0.0
    compiled: bool = False

    def part(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch, as its part of a step."""
        loss = self.loss(model, x, y)
        return loss / self.accumulate if self.accumulate > 1 else loss


def parser(about: str | None) -> argparse.ArgumentParser:
    """The arguments of all such scripts; a script adds its own."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--ddp", action="store_true", help="as a rank of torchrun")
    made.add_argument("--ranks", type=int, required=True, help="how many train together")
    made.add_argument("--batch", type=int, required=True, help="samples of one rank in a batch")
    made.add_argument("--steps", type=int, required=True)
    made.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    made.add_argument("--out", type=Path, required=True, help="seconds per step and final loss, as JSON")
    return made


def train(args: argparse.Namespace, training: Training) -> None:
    """Train on the side that the arguments say."""
    torch.set_num_threads(1)
    (ddp if args.ddp else ours)(args, training)


def ours(args: argparse.Namespace, training: Training) -> None:
    import paramserver as ps

    clock = Clock(args.skip)
    with ps.init() as ctx:
        model = training.network()
        optimizer = training.optimizer(model, False)
        samples = training.data(args.ranks * training.accumulate * args.batch)
        loader: Any = DataLoader(samples, batch_size=args.batch)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=training.accumulate)
        run: Any = torch.compile(model) if training.compiled else model
        for _ in ctx.epochs(1):
            for x, y in loader:
                clock.at(ctx.version)
                training.part(run, x, y).backward()  # type: ignore[no-untyped-call]
                if not ctx.step_due:
                    continue
                if training.clip_norm:
                    ctx.clip_grad_norm(training.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
        finish(ctx.device)
        clock.at(ctx.version)
        if ctx.rank == 0:
            write(args, training, clock, model, samples)


def ddp(args: argparse.Namespace, training: Training) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    clock = Clock(args.skip)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # As for our workers: ranks share the GPUs there are.
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    bare = training.network().to(device)
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True, broadcast_buffers=False)
    run: Any = torch.compile(model) if training.compiled else model
    optimizer = training.optimizer(model, True)
    slice_size = args.batch * training.accumulate
    samples = training.data(ranks * slice_size)
    firsts = range(rank * slice_size, len(samples), slice_size * ranks)
    mine = [at for first in firsts for at in range(first, first + slice_size)]
    for number, (x, y) in enumerate(DataLoader(samples, batch_size=args.batch, sampler=mine)):
        clock.at(number // training.accumulate)
        due = (number + 1) % training.accumulate == 0
        with nullcontext() if due else model.no_sync():
            training.part(run, x.to(device), y.to(device)).backward()  # type: ignore[no-untyped-call]
        if due:
            if training.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    finish(device)
    clock.at(args.steps)
    if rank == 0:
        write(args, training, clock, bare, samples)
    dist.destroy_process_group()


def finish(device: torch.device) -> None:
    """Return when the device has done all its work: a GPU works on after the calls have returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(args: argparse.Namespace, training: Training, clock: Clock, model: nn.Module, samples: Any) -> None:
    """With the loss on the first samples; the model is in training mode, so buffers do not count."""
    device = next(model.parameters()).device
    first = zip(*(samples[i] for i in range(training.judged)), strict=True)
    x, y = (torch.stack(parts).to(device) for parts in first)
    with torch.no_grad():
        loss = training.loss(model, x, y).item()
    args.out.write_text(json.dumps({"step_s": clock.seconds(), "loss": loss}))
