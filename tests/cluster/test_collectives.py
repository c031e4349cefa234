"""All collectives of torch.distributed on servers in this process, compared with what torch says of them."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paramserver.v1 import shard_pb2
from tests.support.ranks.here import Here

SIZE = 3


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with Here(SIZE) as made:
        yield made


def part(rank: int, shape: tuple[int, ...] = (5, 7), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


def options(kind: type, **values: object) -> object:
    made = kind()
    for key, value in values.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT])
def test_all_reduce(here: Here, op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> None:
    def work(rank: int) -> torch.Tensor:
        tensor = part(rank, dtype=dtype)
        here.groups[rank].allreduce([tensor], options(dist.AllreduceOptions, reduceOp=op)).wait()
        return tensor

    stack = torch.stack([part(rank, dtype=dtype).to(torch.float64) for rank in range(SIZE)])
    expected = {
        dist.ReduceOp.SUM: stack.sum(0),
        dist.ReduceOp.MAX: stack.amax(0),
        dist.ReduceOp.MIN: stack.amin(0),
        dist.ReduceOp.PRODUCT: stack.prod(0),
    }[op]
    found = here.all(work)
    # Each of SIZE roundings is off by at most half a unit in the last place of what was computed until then.
    unit = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
    largest = stack.abs().sum(0) if op == dist.ReduceOp.SUM else expected.abs()
    assert bool(((found[0].double() - expected).abs() <= SIZE * unit * largest).all())
    assert all(torch.equal(found[0], other) for other in found)


def test_the_same_bits_for_any_order_of_arrival(here: Here) -> None:
    def once(seed: int) -> torch.Tensor:
        delays = random.Random(seed).sample([0.0, 0.02, 0.04], SIZE)

        def work(rank: int) -> torch.Tensor:
            tensor = part(rank, (200_000,))  # several pieces on both servers
            time.sleep(delays[rank])  # makes the order; the result may not depend on it
            here.groups[rank].allreduce([tensor]).wait()
            return tensor

        return here.all(work)[0]

    one_by_one = part(0, (200_000,)) + part(1, (200_000,)) + part(2, (200_000,))
    assert all(torch.equal(once(seed), one_by_one) for seed in range(6))


def test_a_barrier_waits_for_the_collectives_before_it(here: Here) -> None:
    """As in gloo. A message that nobody has sent yet does not hold it up."""

    def work(rank: int) -> torch.Tensor:
        group, other = here.groups[rank], torch.zeros(1)
        message = group.recv([other], 1) if rank == 0 else None
        tensor = part(rank, (3_000_000,))
        begun = group.allreduce([tensor])
        group.barrier().wait()
        assert begun.is_completed()
        if rank == 1:
            group.send([torch.ones(1)], 0).wait()
        if message is not None:
            message.wait()
            assert other.item() == 1.0
        return tensor

    found = here.all(work)
    assert torch.equal(found[0], part(0, (3_000_000,)) + part(1, (3_000_000,)) + part(2, (3_000_000,)))


def test_tensors_that_are_not_contiguous_are_filled(here: Here) -> None:
    def work(rank: int) -> torch.Tensor:
        tensor = part(rank).t()
        here.groups[rank].allreduce([tensor]).wait()
        return tensor

    expected = (part(0) + part(1) + part(2)).t()
    assert all(torch.equal(found, expected) for found in here.all(work))


def test_broadcast_gather_and_scatter(here: Here) -> None:
    def work(rank: int) -> None:
        group = here.groups[rank]
        tensor = part(rank)
        group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=1)).wait()
        assert torch.equal(tensor, part(1))
        outputs = [[torch.empty(5, 7) for _ in range(SIZE)]] if rank == 2 else []
        group.gather(outputs, [part(rank)], options(dist.GatherOptions, rootRank=2)).wait()
        assert all(torch.equal(found, part(r)) for one in outputs for r, found in enumerate(one))
        output = torch.empty(5, 7)
        inputs = [[part(10 + r) for r in range(SIZE)]] if rank == 0 else []
        group.scatter([output], inputs, options(dist.ScatterOptions, rootRank=0)).wait()
        assert torch.equal(output, part(10 + rank))

    here.all(work)


def test_all_gather(here: Here) -> None:
    def work(rank: int) -> None:
        group, outputs = here.groups[rank], [torch.empty(5, 7) for _ in range(SIZE)]
        group.allgather([outputs], [part(rank)]).wait()
        assert all(torch.equal(found, part(r)) for r, found in enumerate(outputs))
        flat = torch.empty(SIZE * 5, 7)
        group._allgather_base(flat, part(rank)).wait()
        assert torch.equal(flat, torch.cat(outputs))
        lists = [[torch.empty(5, 7), torch.empty(2)] for _ in range(SIZE)]
        group.allgather_coalesced(lists, [part(rank), torch.full((2,), float(rank))]).wait()
        assert [one[1].tolist() for one in lists] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]

    here.all(work)


def test_reduce_and_reduce_scatter(here: Here) -> None:
    total = part(0, (SIZE, 4)) + part(1, (SIZE, 4)) + part(2, (SIZE, 4))

    def work(rank: int) -> None:
        group, tensor = here.groups[rank], part(rank, (SIZE, 4))
        group.reduce([tensor], options(dist.ReduceOptions, rootRank=1)).wait()
        assert torch.equal(tensor, total if rank == 1 else part(rank, (SIZE, 4)))
        output, how = torch.empty(4), options(dist.ReduceScatterOptions)
        group.reduce_scatter([output], [list(part(rank, (SIZE, 4)))], how).wait()
        assert torch.equal(output, total[rank])
        output.zero_()
        group._reduce_scatter_base(output, part(rank, (SIZE, 4)), how).wait()
        assert torch.equal(output, total[rank])

    here.all(work)


def test_all_to_all(here: Here) -> None:
    def work(rank: int) -> None:
        group, outputs = here.groups[rank], [torch.empty(2) for _ in range(SIZE)]
        group.alltoall(outputs, [torch.full((2,), 10.0 * rank + to) for to in range(SIZE)]).wait()
        assert [found[0].item() for found in outputs] == [10.0 * source + rank for source in range(SIZE)]
        # Rank r sends r + 1 rows to each rank.
        output = torch.empty(6, 2)
        given = torch.full((SIZE * (rank + 1), 2), float(rank))
        group.alltoall_base(output, given, [1, 2, 3], [rank + 1] * SIZE).wait()
        assert output[:, 0].tolist() == [0, 1, 1, 2, 2, 2]

    here.all(work)


def test_messages_may_be_received_in_another_order(here: Here) -> None:
    def work(rank: int) -> None:
        group = here.groups[rank]
        if rank == 0:
            works = [group.send([torch.full((3,), float(tag))], 2, tag) for tag in (1, 2)]
        elif rank == 2:
            found = {tag: torch.empty(3) for tag in (2, 1)}
            works = [group.recv([tensor], 0, tag) for tag, tensor in found.items()]
        else:
            return
        for one in works:
            one.wait()
        if rank == 2:
            assert [found[tag][0].item() for tag in (1, 2)] == [1.0, 2.0]

    here.all(work)


def test_ddp_as_plain_torch(here: Here) -> None:
    """Buffers, an unused parameter, and accumulation with no_sync; the reference adds the ranks' gradients itself."""
    torch.manual_seed(0)
    template = torch.nn.ModuleDict(
        {"used": torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)), "unused": torch.nn.Linear(2, 2)}
    )
    data = torch.randn(4, SIZE, 5, 6, generator=torch.Generator().manual_seed(1))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = copy.deepcopy(template)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.parts["used"](x)
            return found

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(Net(), process_group=here.groups[rank], find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(0, 4, 2):
            with model.no_sync():
                model(data[step, rank]).square().mean().backward()
            model(data[step + 1, rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}

    def reference() -> dict[str, torch.Tensor]:
        models = [Net() for _ in range(SIZE)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(4):
            for rank, model in enumerate(models):
                if rank:
                    for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
                        mine.copy_(first)
            for rank, model in enumerate(models):
                model(data[step, rank]).square().mean().backward()
            if step % 2:
                for many in zip(*(model.parameters() for model in models), strict=True):
                    if many[0].grad is not None:
                        mean = torch.stack([p.grad for p in many if p.grad is not None]).mean(0)
                        for one in many:
                            one.grad = mean.clone()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return dict(models[0].state_dict())

    found = here.all(work)
    for name, expected in reference().items():
        torch.testing.assert_close(found[0][name], expected, rtol=1e-5, atol=1e-6, msg=name)
        if "running" not in name and "batches" not in name:  # DDP sends rank 0's buffers before each forward pass
            assert all(torch.equal(found[0][name], other[name]) for other in found)


def test_ranks_that_call_different_collectives_are_told(here: Here) -> None:
    with Here(2) as two:

        def work(rank: int) -> None:
            group = two.groups[rank]
            (group.allreduce([torch.zeros(4)]) if rank else group.barrier()).wait()

        for text in two.errors(work):
            assert text.startswith("UserError: rank ")
            assert "all_reduce (sum) of 4 float32" in text
            assert "barrier" in text


def test_a_rank_that_does_not_come_is_named() -> None:
    with Here(2, timeout_s=0.3) as two:
        [text, _] = two.errors(lambda rank: two.groups[rank].barrier().wait() if rank == 0 else None)
    assert text.startswith("DeadlineError: barrier has waited 0.3 s for rank 1: look there for an error")


def test_an_error_reaches_ddp_as_a_sentence() -> None:
    """C++ waits for the future of the work."""
    with Here(2, timeout_s=0.3) as two:
        [text, _] = two.errors(
            lambda r: two.groups[r].allreduce([torch.ones(2)]).get_future().wait() if r == 0 else None
        )
    assert "all_reduce (sum) of 2 float32 has waited 0.3 s for rank 1" in text


def test_a_server_that_was_started_again_has_lost_the_group() -> None:
    with Here(2) as two:
        two.all(lambda rank: two.groups[rank].allreduce([torch.ones(100_000)]).wait())
        two.begin_anew(0)
        for text in two.errors(lambda rank: two.groups[rank].allreduce([torch.ones(100_000)]).wait()):
            assert text.startswith("JobFailedError: a server was started again")


def test_a_call_that_breaks_off_is_repeated_and_counts_once() -> None:
    with Here(2, servers=1) as two:
        calls: list[int] = []
        service: Any = two.services[0]
        collect = service.collect

        def counted(request: shard_pb2.CollectRequest) -> object:
            calls.append(request.rank)
            return collect(request)

        async def break_off() -> None:
            service.collect = counted
            while len(calls) < 1:  # rank 0 waits for rank 1
                await asyncio.sleep(0.01)
            two.memory.kill("server-0")
            two.memory.serve("server-0", [("Shard", service)])

        def work(rank: int) -> torch.Tensor:
            tensor = torch.full((4,), rank + 1.0)
            if rank == 1:
                two.background.run(break_off(), 20.0)
            two.groups[rank].allreduce([tensor]).wait()
            return tensor

        service.collect = counted
        two.memory.kill("server-0")
        two.background.run(_serve(two))
        assert all(found.tolist() == [3.0] * 4 for found in two.all(work))
        assert sorted(calls) == [0, 0, 1], "rank 0 has called twice"


async def _serve(here: Here) -> None:
    here.memory.serve("server-0", [("Shard", here.services[0])])
