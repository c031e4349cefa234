"""Rows about the process group of the servers: the same script with another name of the backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parity.features.loops import UNEVEN, Normed, Partly, Tied, compiled
from benchmarks.parity.rows import DDP, RANKS, ROUNDING, Row, Tensors
from benchmarks.parity.sides import Side
from benchmarks.parity.training import DATA, Training
from tests.support.cluster.programs import Aligned, generator

REDUCTIONS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


def mine(elements: int = 40) -> Tensor:
    """Numbers of this rank."""
    return torch.randn(elements, generator=generator(10 + dist.get_rank()))


def reductions(side: Side) -> Tensors:
    """all_reduce with each operation, reduce, reduce_scatter."""
    found: dict[str, Tensor] = {}
    for name, operation in REDUCTIONS.items():
        found[name] = mine()
        dist.all_reduce(found[name], operation)
    found["whole numbers"] = torch.arange(9) * (dist.get_rank() + 3)
    dist.all_reduce(found["whole numbers"], ReduceOp.BXOR)
    found["reduce"] = mine()
    dist.reduce(found["reduce"], 0)
    found["reduce_scatter"] = torch.empty(20)
    dist.reduce_scatter_tensor(found["reduce_scatter"], mine())
    return found


def copies(side: Side) -> Tensors:
    """broadcast, all_gather, gather, scatter, all_to_all, send and recv, a group of one rank, objects."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    found = {
        "broadcast": mine(),
        "all_gather": torch.empty(80),
        "scatter": torch.empty(40),
        "all_to_all": torch.empty(40),
    }
    dist.broadcast(found["broadcast"], 1)
    dist.all_gather_into_tensor(found["all_gather"], mine())
    pieces = [torch.empty(40) for _ in range(RANKS)]
    dist.gather(mine(), pieces if rank == 0 else None, 0)
    found["gather"] = torch.cat(pieces) if rank == 0 else torch.empty(0)
    dist.scatter(found["scatter"], [mine() + number for number in range(RANKS)] if rank == 1 else None, 1)
    dist.all_to_all_single(found["all_to_all"], mine())
    found["message"] = torch.empty(40)
    sent = dist.isend(mine(), other)
    dist.recv(found["message"], other)
    assert sent is not None
    sent.wait()
    alone = [dist.new_group([number]) for number in range(RANKS)][rank]
    found["alone"] = mine()
    dist.all_reduce(found["alone"], group=alone)
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = torch.tensor([one["rank"] for one in objects])
    dist.barrier()
    return found


def zero(side: Side) -> Tensors:
    """Each rank keeps the optimizer's state of a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # this import warns of things of torch's own

    def sharded(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)

    model: Any = Aligned()
    model, optimizer, loader = side.prepare(model, sharded(model.parameters()), DATA)
    for _ in side.epochs(2):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model, DistributedDataParallel)
    return dict(model.module.state_dict())


def row(feature: str, train: Callable[[Side], Tensors], within: float = 0.0, **ddp: Any) -> Row:
    """A row of the process group."""
    return Row(f"Process group: {feature}", DDP, train, within, group=True, ddp=ddp)


WHOLE = Training()
ROWS = [
    row("a plain loop", WHOLE),
    row("accumulation of 4 batches, `no_sync`, clipping", replace(WHOLE, data=UNEVEN, clip=0.1)),
    row("GradScaler", replace(WHOLE, scaler=True)),
    row("bf16 autocast", replace(WHOLE, bf16=True)),
    row("unused parameters", replace(WHOLE, model=Partly), find_unused_parameters=True),
    row("weight tying", replace(WHOLE, model=Tied)),
    row("BatchNorm, whose buffers rank 0 gives to all", replace(WHOLE, model=Normed)),
    row("`static_graph`", WHOLE, static_graph=True),
    row("`torch.compile`", replace(WHOLE, model=compiled)),
    row("`ZeroRedundancyOptimizer`", zero),
    row("reductions", reductions, ROUNDING),
    row("collectives that copy, messages, objects, subgroups", copies),
]
