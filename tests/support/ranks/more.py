"""What builds on process groups, one case after the other: BACKEND RESULT. Rank 0 writes {case: tensors} to RESULT."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
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


def uneven_inputs_divided_by_the_ranks_that_have_some() -> Found:
    model: Any = DistributedDataParallel(net())
    with model.join(divide_by_initial_world_size=False):
        return train(model, data(3 + 2 * dist.get_rank()))


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


class Ways(torch.nn.Module):
    """Each batch takes one of two ways. A buffer counts the samples."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        found: torch.Tensor = self.left(x) if x.sum() > 0 else self.right(x)
        return found


def other_ways_on_each_rank() -> Found:
    return train(DistributedDataParallel(Ways(), find_unused_parameters=True), data(4))


def a_buffer_of_each_rank() -> Found:
    model = DistributedDataParallel(Ways(), find_unused_parameters=True, broadcast_buffers=False)
    return [*train(model, data(4)), model.module.seen]


def ignored_parameters() -> Found:
    model: Any = net()
    model._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    return train(DistributedDataParallel(model), data(4))


def unused_in_the_last_batch() -> Found:
    """What the batches in ``no_sync`` have used counts in the step."""
    model: Any = DistributedDataParallel(Ways(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data(3):
        with model.no_sync():
            model(x.abs()).square().mean().backward()
        model(-x.abs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def several_forward_passes() -> Found:
    """With a graph that does not change, and a penalty on gradients."""
    model: Any = DistributedDataParallel(net(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data(3):
        x.requires_grad_()
        loss = model(x).square().mean() + model(2 * x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def a_rank_without_samples() -> Found:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data(3):
        model(x[: 3 * (dist.get_rank() != 1)]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def late_reductions() -> Found:
    """Gradients of the last layer are reduced when the backward pass has come to the first one."""
    model: Any = net()
    late = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("2.")]
    hook = model[0].weight
    return train(
        DistributedDataParallel(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=hook), data(4)
    )


def averaged_models() -> Found:
    """Gradients are averaged in the first two steps, and then models are, in every second step."""
    model: Any = DistributedDataParallel(net())
    state: Any = post_localSGD_hook.PostLocalSGDState
    model.register_comm_hook(state(None, None, 2, False), post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    return train(model, data(5), PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))


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
    uneven_inputs_divided_by_the_ranks_that_have_some,
    zero_redundancy,
    half_precision_hook,
    power_sgd,
    static_graph,
    other_ways_on_each_rank,
    a_buffer_of_each_rank,
    ignored_parameters,
    unused_in_the_last_batch,
    several_forward_passes,
    a_rank_without_samples,
    late_reductions,
    averaged_models,
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
