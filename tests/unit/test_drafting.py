"""Drafts with their tensors: the bits of the version, and the optimizer state is left alone until then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import TensorSpec, make_layout
from paramserver.core.versions import drafts as rules
from paramserver.core.versions.names import SyncName
from paramserver.server.arithmetic.combine import Sum
from paramserver.server.versions.drafting import Draft, Drafting
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.optimizers import describe

LAYOUT = make_layout([TensorSpec("w", (32,), "float32")], chunk_bytes=64)
CHUNKS = range(len(LAYOUT.chunks))
GROUP = describe(torch.optim.Adam([torch.zeros(1)]))[1][0]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DRAFT_BYTES", 0)


def part(lo: int, worker: int = 0) -> Contribution:
    """Half of a step of two slices, of which nothing has come yet."""
    return Contribution(SyncName(0, lo, lo + 1, 2), worker or lo + 1, 4, False, 0, frozenset({0}), (GROUP,), {})


def chunk(one: Contribution, index: int, value: float) -> None:
    assert isinstance(one.chunks, dict)
    one.chunks[index] = torch.full((LAYOUT.chunks[index].elements,), value)


async def now(work: Callable[[], None]) -> None:
    work()


def draft_of(drafts: Drafting) -> Draft | None:
    return drafts.draft


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def shard() -> tuple[ShardTensors, Version, Drafting]:
    tensors = ShardTensors(LAYOUT, LAYOUT.chunks, Optimizers(("adam",)))
    ones = {c.index: torch.ones(c.elements) for c in LAYOUT.chunks}
    base, drafts = Version(0, LAYOUT.chunks, ones), Drafting(tensors, now)
    drafts.opened(base)
    return tensors, base, drafts


def test_a_draft_has_the_bits_of_the_version_and_leaves_the_state_alone() -> None:
    async def test() -> None:
        tensors, base, drafts = shard()
        left, right = part(0), part(1)
        drafts.begins(left, CHUNKS)
        assert draft_of(drafts) is None
        drafts.begins(right, CHUNKS)
        draft = draft_of(drafts)
        assert draft is not None
        for index in range(len(LAYOUT.chunks)):
            chunk(left, index, 1.0)
            drafts.came(left, index)
            await settle()
            assert index not in draft.made, "the other half is missing"
            chunk(right, index, 2.0)
            drafts.came(right, index)
            await settle()
            assert index in draft.made
            assert not list(tensors.states[index].export()), "nothing has been updated yet"
        assert drafts.take([left, right]) is draft
        other = ShardTensors(LAYOUT, LAYOUT.chunks, Optimizers(("adam",)))
        plain = other.build(base, [left, right])
        adopted = tensors.build(base, [left, right], drafted=draft.made)
        for index in plain.tensors:
            assert torch.equal(plain.tensors[index], adopted.tensors[index])
            for mine, theirs in zip(tensors.states[index].export(), other.states[index].export(), strict=True):
                assert mine[:3] == theirs[:3]
                assert torch.equal(mine[3], theirs[3])
        assert (drafts.adopted, drafts.forgotten) == (1, 0)

    asyncio.run(test())


def test_chunks_of_a_draft_that_was_forgotten_are_not_made() -> None:
    async def test() -> None:
        _, _, drafts = shard()
        left, right = part(0), part(1)
        for one in (left, right):
            drafts.begins(one, CHUNKS)
        draft = draft_of(drafts)
        assert draft is not None
        for one in (left, right):
            chunk(one, 0, 1.0)
            drafts.came(one, 0)
        drafts.fails(right)
        await settle()
        assert draft.made == {}
        await drafts.close()

    asyncio.run(test())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_of_a_draft_are_known_to_be_finite_chunk_by_chunk(bad: float) -> None:
    async def test() -> None:
        _, _, drafts = shard()
        left, right, stranger = part(0), part(1), part(0, worker=9)
        drafts.begins(left, CHUNKS)
        drafts.begins(right, CHUNKS)
        for index in CHUNKS:
            chunk(left, index, 1.0)
            chunk(right, index, bad if index == 1 else 2.0)
            drafts.came(left, index)
            await settle()
            assert index not in drafts.finite(left), "the other half has not come"
            drafts.came(right, index)
        await settle()
        assert len(CHUNKS) == 2
        assert {*drafts.finite(left)} == {*drafts.finite(right)} == {0}
        assert not drafts.finite(stranger)
        drafts.fails(right)
        assert not drafts.finite(left)

    asyncio.run(test())


def test_a_sum_of_which_a_part_was_computed_proves_nothing() -> None:
    bad = torch.ones(64)
    bad[40] = torch.nan
    summed = Sum([((0, 1), torch.ones(64)), ((1, 2), bad)], 2, look=True)
    for _ in summed.tiles(0, 32):
        pass
    assert summed.finite
    assert not summed.all_finite
    summed = Sum([((0, 1), torch.ones(64)), ((1, 2), torch.ones(64))], 2, look=True)
    for _ in summed.tiles(0, 64):
        pass
    assert summed.all_finite
    assert not Sum([((0, 1), torch.ones(64))]).all_finite
