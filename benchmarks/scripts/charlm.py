"""The training that `benchmarks.charlm` measures: the model of `workers/charlm.py` with 10 M parameters.

`beside_ddp` trains it on both sides.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from benchmarks.scripts.beside_ddp import Training, parser, train

charlm: Any = import_module("workers.charlm")


def network(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(1)
    made: nn.Module = charlm.CharLM(*charlm.SIZES[args.size], args.context)
    return made


def optimizer_of(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(charlm.groups(model.parameters(), 0.1), lr=3e-4, betas=(0.9, 0.95), fused=fused)


def data(args: argparse.Namespace, together: int) -> Subset[Any]:
    """Just so many pieces of the standard library that all steps are full. ``together``: pieces in a step."""
    windows = charlm.Windows(charlm.standard_library(), args.context)
    pieces = args.steps * together
    return Subset(windows, range(0, pieces * (len(windows) // pieces), len(windows) // pieces))


def main() -> None:
    own = parser(__doc__)
    own.add_argument("--compile", type=int, required=True, help="1: with torch.compile")
    own.add_argument("--size", required=True, help="of workers/charlm.py")
    own.add_argument("--context", type=int, required=True, help="bytes that the model sees at once")
    own.add_argument("--accumulate", type=int, required=True, help="batches of one rank in a step")
    args = own.parse_args()
    training = Training(
        network=lambda: network(args),
        optimizer=optimizer_of,
        data=lambda together: data(args, together),
        loss=lambda model, x, y: charlm.loss_of(model, x, y, False),
        judged=16,
        accumulate=args.accumulate,
        clip_norm=1.0,
        compiled=bool(args.compile),
    )
    train(args, training)


if __name__ == "__main__":
    main()
