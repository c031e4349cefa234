"""The trainings that `benchmarks.train` measures: the digits, and a transformer of 10 M parameters.

Started by `paramserver run` it trains as a worker of a cluster, with ``--ddp`` by torchrun as a rank of PyTorch's
DistributedDataParallel: the same model, initial weights, batches in the same order, and update. The first rank writes
seconds per step, without the first steps, and the loss after the last step.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts.clock import Clock

VOCABULARY, TOKENS = 256, 64
WIDTH, LAYERS, HEADS = 384, 6, 6


class Transformer(nn.Module):
    """Predicts the next of 64 tokens; 10.9 M parameters. Takes (batch, 64) token numbers, gives a score for each."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.token(x) + self.position, mask=self.mask, is_causal=True)
        scores: Tensor = self.scores(hidden)
        return scores.transpose(1, 2)


def network(case: str) -> nn.Module:
    digits = import_module("workers.digits")

    torch.manual_seed(1)
    return digits.DigitsNet() if case == "digits" else Transformer()


def optimizer_of(case: str, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    if case == "digits":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=fused)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)


def data(case: str, samples: int) -> TensorDataset:
    """So many samples: the digits again and again, or text in which a token mostly follows from the previous token."""
    if case == "digits":
        x, y = import_module("workers.digits").load_data()[0].tensors
        again = torch.arange(samples) % len(y)
        return TensorDataset(x[again], y[again])
    numbers = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=numbers)
    follows = torch.rand(samples, TOKENS, generator=numbers) < 0.8
    for at in range(TOKENS):
        text[:, at + 1] = torch.where(follows[:, at], (text[:, at] * 7 + 3) % VOCABULARY, text[:, at + 1])
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def write(args: argparse.Namespace, clock: Clock, model: nn.Module, samples: TensorDataset) -> None:
    """With the loss on the first samples; the model is in training mode, so buffers do not count."""
    x, y = (tensor[:64] for tensor in samples.tensors)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    args.out.write_text(json.dumps({"step_s": clock.seconds(), "loss": loss}))


def ours(args: argparse.Namespace) -> None:
    import paramserver as ps

    clock = Clock(args.skip)
    with ps.init() as ctx:
        model = network(args.case)
        optimizer = optimizer_of(args.case, model, fused=False)  # the servers' own is fused
        samples = data(args.case, args.steps * args.batch * args.ranks)
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(samples, batch_size=args.batch))
        for _ in ctx.epochs(1):
            for x, y in loader:
                clock.at(ctx.version)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
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
    model = DistributedDataParallel(network(args.case), gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = optimizer_of(args.case, model, fused=True)
    samples = data(args.case, args.steps * args.batch * ranks)
    firsts = range(rank * args.batch, len(samples), args.batch * ranks)
    mine = [at for first in firsts for at in range(first, first + args.batch)]
    for step, (x, y) in enumerate(DataLoader(samples, batch_size=args.batch, sampler=mine)):
        clock.at(step)
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    clock.at(args.steps)
    if rank == 0:
        write(args, clock, model.module, samples)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="as a rank of torchrun")
    parser.add_argument("--case", choices=["digits", "transformer"], required=True)
    parser.add_argument("--ranks", type=int, required=True, help="how many train together")
    parser.add_argument("--batch", type=int, required=True, help="samples of one rank in a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="steps at the beginning that do not count")
    parser.add_argument("--out", type=Path, required=True, help="seconds per step and final loss, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (ddp if args.ddp else ours)(args)


if __name__ == "__main__":
    main()
