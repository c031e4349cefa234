"""The next version of a shard: the same bits with any number of threads, and in memory that is given or new."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import Chunk, Kind, Layout, TensorSpec, make_layout, make_plan
from paramserver.core.versions.names import SyncName
from paramserver.errors import NonFiniteError
from paramserver.server.arithmetic.combine import Sum
from paramserver.server.team import Team
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.optimizers import describe
from tests.support.states import exported

SPECS = [
    TensorSpec("a", (37, 5), "float32"),
    TensorSpec("b", (11,), "float32"),
    TensorSpec("unused", (70,), "float32"),
    TensorSpec("c", (300,), "float64"),
    TensorSpec("running_mean", (9,), "float32", Kind.BUFFER),
    TensorSpec("table", (20,), "float32", Kind.FROZEN),
]
USED = frozenset((0, 1, 3, 4))
STEPS, SLICES = 3, 4


def flat(layout: Layout, chunk: Chunk, numbers: torch.Generator) -> torch.Tensor:
    """Random numbers; padding is zero."""
    values = torch.zeros(chunk.elements, dtype=getattr(torch, chunk.dtype))
    for piece in chunk.pieces:
        part = torch.randn(piece.elements, generator=numbers, dtype=values.dtype)
        values[piece.chunk_start : piece.chunk_start + piece.elements] = part
    return values


class Shard:
    """All tensors in small chunks, and the contributions of a few steps."""

    def __init__(self, optimizer: str, threads: int = 1) -> None:
        self.layout = make_layout(SPECS, 128)
        self.plan = make_plan(self.layout, 1)
        made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]([torch.zeros(1)], lr=0.1)
        self.name, (self.group, *_) = describe(made)
        self.team = Team(threads)
        self.tensors = ShardTensors(self.layout, self.plan.chunks_of(0), Optimizers((self.name,)), self.team)
        self.numbers = torch.Generator().manual_seed(3)
        chunks = {c.index: flat(self.layout, c, self.numbers) for c in self.tensors.chunks}
        self.version = Version(0, self.tensors.chunks, chunks)

    def contributions(self, checked: bool = True) -> list[Contribution]:
        """Of all slices of the open step."""
        step = self.version.number
        wanted = self.tensors.chunks_used(USED)
        return [
            Contribution(
                SyncName(step, slice_, slice_ + 1, SLICES), 1, 2, False, step, USED, (self.group,),
                {index: flat(self.layout, chunk, self.numbers) for index, chunk in wanted.items()}, checked=checked,
            )
            for slice_ in range(SLICES)
        ]  # fmt: skip

    def bits(self) -> list[bytes]:
        """The present weights, and the optimizer state."""
        weights = [t.numpy().tobytes() for _, t in sorted(self.version.tensors.items())]
        return weights + [entry[3].numpy().tobytes() for entry in exported(self.tensors)]


def plain(optimizer: str) -> list[bytes]:
    """After all steps, as one thread makes it in memory of its own."""
    shard = Shard(optimizer)
    for _ in range(STEPS):
        shard.version = shard.tensors.build(shard.version, shard.contributions())
    return shard.bits()


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "given memory"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_same_bits(optimizer: str, threads: int, given: bool) -> None:
    shard = Shard(optimizer, threads)
    slots = [{c.index: torch.full_like(shard.version.tensors[c.index], 7) for c in shard.tensors.chunks} for _ in "ab"]
    for step in range(STEPS):
        slot = slots[step % 2]
        space = (lambda chunk, slot=slot: slot[chunk.index]) if given else None
        before = {index: tensor.clone() for index, tensor in shard.version.tensors.items()}
        base, shard.version = shard.version, shard.tensors.build(shard.version, shard.contributions(), None, space)
        assert all(torch.equal(base.tensors[index], tensor) for index, tensor in before.items())
        for chunk in shard.tensors.chunks if given else ():
            there = shard.version.tensors[chunk.index]
            assert (there.data_ptr() == slot[chunk.index].data_ptr()) == (chunk.kind is not Kind.FROZEN)
    shard.team.close()
    assert shard.bits() == plain(optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_backup_needs_the_sum_alone(optimizer: str) -> None:
    """A step makes the same bits out of all its contributions, and out of one that is their sum; also of buffers."""
    shard, backup = Shard(optimizer), Shard(optimizer)
    for step in range(STEPS):
        parts = shard.contributions()
        sums = {
            index: Sum(
                [((p.name.lo, p.name.hi), p.chunks[index]) for p in parts if isinstance(p.name, SyncName)], SLICES
            )
            for index in parts[0].chunks
        }
        whole = replace(
            parts[0],
            name=SyncName(step, 0, SLICES, SLICES),
            samples=sum(part.samples for part in parts),
            chunks={index: one.whole() for index, one in sums.items()},
        )
        shard.version = shard.tensors.build(shard.version, parts)
        backup.version = backup.tensors.build(backup.version, [whole])
        assert backup.bits() == shard.bits(), f"step {step}"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_nobody_here_has_checked(number: float) -> None:
    shard = Shard("sgd", 2)
    good = shard.contributions(checked=False)
    chunk = next(c for c in shard.tensors.chunks if c.pieces[0].tensor == 3)
    good[2].chunks[chunk.index][0] = number
    with pytest.raises(NonFiniteError, match="'c'"):
        shard.tensors.build(shard.version, good)
    shard.team.close()


def test_finite_gradients_whose_sum_is_not() -> None:
    """As over a network, where each was checked on its own: it is applied."""
    weights = []
    for checked in (True, False):
        shard = Shard("sgd")
        large = shard.contributions(checked)
        for one in large:
            for values in one.chunks.values():
                values.fill_(torch.finfo(values.dtype).max)
        weights.append(shard.tensors.build(shard.version, large).tensors)
    assert all(torch.equal(one, weights[1][index]) for index, one in weights[0].items())
    assert any(one.isinf().any() for one in weights[0].values())
