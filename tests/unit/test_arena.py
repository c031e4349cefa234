"""Where segments lie in shared memory, and who owns which pages."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paramserver.core.layout.arena import Run, make_arena, pages
from paramserver.core.layout.plan import ITEMSIZE, Kind, TensorSpec, make_layout, make_plan

PAGE = 4096
MIXED = (
    TensorSpec("w", (100, 70), "float32"),
    TensorSpec("mean", (70,), "float32", Kind.BUFFER),
    TensorSpec("table", (3000,), "float64", Kind.FROZEN),
    TensorSpec("b", (5,), "float64", group=1),
    TensorSpec("nothing", (0,), "float32", group=2),
)


@pytest.mark.parametrize("chunk_bytes", [0, 64, 832, 16384])
def test_segments_lie_apart_at_page_boundaries_and_chunks_tile_them(chunk_bytes: int) -> None:
    layout = make_layout(MIXED, chunk_bytes)
    arena = make_arena(layout, PAGE)
    taken: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for segment in layout.segments:
        start = arena.starts[segment.index]
        assert start % PAGE == 0
        end = start + segment.elements * ITEMSIZE[segment.dtype]
        taken[segment.kind is Kind.FROZEN].append((start, end))
        at = start
        for chunk in layout.chunks:
            if chunk.segment == segment.index:
                assert arena.start(chunk) == at
                at += chunk.nbytes
        assert at == end
    for frozen, size in ((True, arena.frozen_bytes), (False, arena.slot_bytes)):
        assert size % PAGE == 0
        ranges = sorted(taken[frozen])
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
        assert ranges[-1][1] <= size


def test_slots_lie_behind_the_frozen_part() -> None:
    layout = make_layout(MIXED)
    arena = make_arena(layout, PAGE)
    frozen = next(chunk for chunk in layout.chunks if chunk.kind is Kind.FROZEN)
    moving = next(chunk for chunk in layout.chunks if chunk.kind is Kind.PARAMETER)
    assert arena.in_weights(frozen, 0) == arena.in_weights(frozen, 7) == arena.start(frozen)
    assert arena.in_weights(moving, 7) == arena.frozen_bytes + 7 * arena.slot_bytes + arena.start(moving)
    assert arena.weights_bytes(8) == arena.slot_start(8)


def test_a_model_of_nothing_has_slots_of_a_page() -> None:
    assert make_arena(make_layout([TensorSpec("nothing", (0,), "float32")]), PAGE).slot_bytes == PAGE


@pytest.mark.parametrize(
    ("chunk_bytes", "servers", "separable"), [(16384, 1, True), (16384, 3, True), (832, 1, True), (832, 3, False)]
)
def test_pages_of_several_servers_are_apart_where_chunks_are_whole_pages(
    chunk_bytes: int, servers: int, separable: bool
) -> None:
    layout = make_layout([TensorSpec("w", (100_000,), "float32")], chunk_bytes)
    assert make_arena(layout, PAGE).separable(make_plan(layout, servers)) is separable


def test_one_server_has_one_run_per_segment() -> None:
    layout = make_layout(MIXED, 832)
    arena = make_arena(layout, PAGE)
    plan = make_plan(layout, 1)
    runs = [*arena.runs(plan, frozen=False), *arena.runs(plan, frozen=True)]
    sizes = [s.elements * ITEMSIZE[s.dtype] for s in layout.segments if s.elements]
    assert sorted(run.length for run in runs) == sorted(sizes)


def test_pages_cover_runs_once() -> None:
    numbers = random.Random(5)
    for _ in range(50):
        runs, at = [], 0
        for _ in range(numbers.randrange(1, 6)):
            at += numbers.randrange(0, 4 * PAGE)
            runs.append(Run(0, at, numbers.randrange(1, 3 * PAGE)))
            at += runs[-1].length
        touched = {place // PAGE for run in runs for place in range(run.start, run.start + run.length)}
        found = [page for start, length in pages(runs, PAGE) for page in range(start // PAGE, (start + length) // PAGE)]
        assert found == sorted(touched)
