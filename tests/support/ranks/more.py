"""What builds on process groups, one case after the other: BACKEND RESULT. Rank 0 writes {case: tensors} to RESULT."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

Found = list[torch.Tensor]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data(batches: int) -> torch.Tensor:
    return torch.randn(batches, 3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def train(model: torch.nn.Module, batches: Iterable[torch.Tensor], optimizer: Any = None) -> Found:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def uneven_inputs() -> Found:
    model: Any = DistributedDataParallel(net())
    with model.join():
        return train(model, data(3 + dist.get_rank()))


def zero_redundancy() -> Found:
    model = DistributedDataParallel(net())
    return train(model, data(4), ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))


def half_precision_hook() -> Found:
    model: Any = DistributedDataParallel(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, data(4))


def power_sgd() -> Found:
    """Its callbacks wait for other collectives."""
    model: Any = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, data(4))


def static_graph() -> Found:
    return train(DistributedDataParallel(net(), gradient_as_bucket_view=True, static_graph=True), data(4))


def fully_sharded() -> Found:
    model: Any = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, data(4))
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def subgroup() -> Found:
    last = dist.get_world_size() - 1
    group, tensor = dist.new_group([0, last]), torch.full((2,), dist.get_rank() + 1.0)
    if dist.get_rank() in (0, last):
        dist.all_reduce(tensor, group=group)
    return [tensor]


def ring() -> Found:
    rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty(4)
    sending = dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size)
    for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, (rank - 1) % size)]):
        work.wait()
    return [received]


def objects() -> Found:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent: list[Any] = [{"a": 1}, 2] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [10 * one for one in range(size)] if rank == 0 else None, 0)
    return [torch.tensor([sent[0]["a"], sent[1], mine[0], *(gathered or [])])]


def functional_collectives() -> Found:
    world, size = dist.group.WORLD, dist.get_world_size()
    assert world is not None
    wait: Callable[[torch.Tensor], torch.Tensor] = functional.wait_tensor
    mine = torch.full((3,), float(dist.get_rank()))
    return [
        wait(functional.all_reduce(mine, "sum", world)).clone(),
        wait(functional.broadcast(mine, 1, world)).clone(),
        wait(functional.all_to_all_single(torch.arange(2.0 * size), None, None, world)).clone(),
    ]


CASES: list[Callable[[], Found]] = [
    uneven_inputs,
    zero_redundancy,
    half_precision_hook,
    power_sgd,
    static_graph,
    fully_sharded,
    subgroup,
    ring,
    objects,
    functional_collectives,
]


def main() -> None:
    backend, result = sys.argv[1:]
    dist.init_process_group(backend)
    found = {case.__name__: case() for case in CASES}
    if dist.get_rank() == 0:
        torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
