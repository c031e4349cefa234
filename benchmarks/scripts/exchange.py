"""One whole synchronous step and nothing but communication and update; measured by `benchmarks.exchange`.

Started by `paramserver run`, a worker contributes gradients that lie ready in the transport's memory, and gets the next
weights. With ``--gloo`` a rank adds its gradients to those of the others and updates its own weights. Every process
writes the beginning and the end of each of its steps, by the clock that all processes share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

TENSORS = 16
OPTIMIZERS = ("sgd", "adamw")


def optimizer_of(name: str, parameters: Iterable[Tensor], fused: bool = False) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.5, fused=fused)
    return torch.optim.AdamW(parameters, lr=0.001, fused=fused)


def gradient(rank: int) -> float:
    """The value of every element of a worker's gradient; sums of such values need no rounding."""
    return (rank + 1) / 1024


class Weights(nn.Module):
    """``megabytes`` (2**20 bytes) of float32 in equal tensors."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(
            nn.Parameter(torch.ones(megabytes * 2**20 // 4 // TENSORS)) for _ in range(TENSORS)
        )


def ours(args: argparse.Namespace) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    import paramserver as ps

    times: list[tuple[int, float, float]] = []
    with ps.init() as ctx:
        made = Weights(args.megabytes)
        data = TensorDataset(torch.arange(args.steps * args.ranks) % args.ranks)
        optimizer = optimizer_of(args.optimizer, made.parameters())
        model, _, loader = ctx.prepare(made, optimizer, DataLoader(data, batch_size=1))
        engine, binding, steps = ctx.engine, ctx.prepared.binding, ctx.prepared.steps
        assert binding is not None
        assert steps is not None
        for _ in ctx.epochs(1):
            for (part,) in loader:
                item = steps.take()
                assert item is not None
                partial = engine.places.pool.take()
                partial.samples = 1
                for index in range(TENSORS):
                    partial.space.view(index).fill_(gradient(int(part)))
                    partial.used.add(index)
                step, began = ctx.version, time.monotonic()
                engine.loop.contribute(item, partial, binding.groups())
                if ctx.version == step + 1:
                    times.append((step, began, time.monotonic()))
        transport, weight = engine.shards.links.near.kind, next(model.parameters())[0].item()
        rank = ctx.rank
    write(args.out, rank, times, weight, transport)


def gloo(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = torch.ones(args.megabytes * 2**20 // 4)
    weights.grad = torch.empty_like(weights)
    optimizer = optimizer_of(args.optimizer, [weights], fused=True)
    times = []
    for step in range(args.steps):
        weights.grad.fill_(gradient(rank) / ranks)
        began = time.monotonic()
        dist.all_reduce(weights.grad)
        optimizer.step()
        times.append((step, began, time.monotonic()))
    write(args.out, rank, times, weights[0].item(), "gloo")
    dist.barrier()
    os._exit(0)


def write(out: Path, rank: int, times: list[tuple[int, float, float]], weight: float, transport: str) -> None:
    """``times``: the number of each step, and when it began and ended."""
    (out / f"{rank}.json").write_text(json.dumps({"times": times, "weight": weight, "transport": transport}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gloo", action="store_true", help="as a rank of torchrun")
    parser.add_argument("--megabytes", type=int, required=True, help="size of the model, in 2**20 bytes")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for the times of each process, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (gloo if args.gloo else ours)(args)


if __name__ == "__main__":
    main()
