"""The reduction tree: one expression, whoever adds which part of it and in whatever order the parts arrive."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.versions.reduction import (
    Merge,
    Node,
    Reducer,
    cover,
    fold_order,
    is_node,
    parent,
    sibling,
    split,
)

# Answers to a node: it contains no other that is held; its slices are covered.
NEW, DUPLICATE = (), None
# An expression: the index of a slice, or the sum of two expressions.
Sums = dict[Node, object]


def halves(lo: int, hi: int) -> object:
    """The expression as the definition says it: halves at the largest power of two below the length."""
    if hi - lo == 1:
        return lo
    middle = lo + 1
    while lo + 2 * (middle - lo) < hi:
        middle = lo + 2 * (middle - lo)
    return (halves(lo, middle), halves(middle, hi))


def by_levels(of: int) -> object:
    """The same, by pairing neighbours level by level."""
    level: list[object] = list(range(of))
    while len(level) > 1:
        level = [tuple(level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def perform(merges: list[Merge] | tuple[Merge, ...], sums: Sums) -> None:
    """Do the merges as a shell would: both halves must be there, and are gone afterwards."""
    for left, right, result in merges:
        sums[result] = (sums.pop(left), sums.pop(right))


def all_nodes(of: int) -> list[Node]:
    nodes = [(0, of)]
    for node in nodes:
        if node[1] - node[0] > 1:
            nodes.extend(split(node, of))
    return nodes


def subtree(node: Node, of: int) -> object:
    return node[0] if node[1] - node[0] == 1 else tuple(subtree(half, of) for half in split(node, of))


@pytest.mark.parametrize("of", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 21, 33, 64, 100])
def test_the_tree_has_one_shape(of: int) -> None:
    """Halving, pairing level by level and folding the leaves are the same, and every node knows its relatives."""
    assert halves(0, of) == by_levels(of) == subtree((0, of), of)
    sums: Sums = {(i, i + 1): i for i in range(of)}
    perform(fold_order(list(sums), of), sums)
    assert sums == {(0, of): halves(0, of)}
    nodes = all_nodes(of)
    assert len(nodes) == len(set(nodes)) == 2 * of - 1
    assert {(lo, hi) for lo in range(of) for hi in range(of + 2) if is_node(lo, hi, of)} == set(nodes)
    for node in nodes:
        above = parent(node, of)
        if above is None:
            assert node == (0, of)
            assert sibling(node, of) is None
        else:
            other = sibling(node, of)
            assert other is not None
            assert split(above, of) == tuple(sorted((node, other)))


@pytest.mark.parametrize(
    ("lo", "hi", "of"), [(0, 0, 4), (-1, 1, 4), (0, 5, 4), (1, 3, 4), (2, 5, 6), (0, 3, 4), (0, 1, 0)]
)
def test_other_ranges_are_no_nodes(lo: int, hi: int, of: int) -> None:
    assert not is_node(lo, hi, of)
    for function in (split, parent, sibling):
        with pytest.raises(ValueError, match="no node"):
            function((lo, hi), of)


def test_a_leaf_has_no_halves() -> None:
    with pytest.raises(ValueError, match="leaf"):
        split((3, 4), 8)


@pytest.mark.parametrize("of", [1, 2, 5, 8, 13])
def test_cover_takes_the_fewest_nodes(of: int) -> None:
    nodes = all_nodes(of)
    for lo in range(of + 1):
        for hi in range(lo, of + 1):
            tiles = cover(lo, hi, of)
            assert [i for start, stop in tiles for i in range(start, stop)] == list(range(lo, hi))
            inside = [node for node in nodes if lo <= node[0] and node[1] <= hi]
            maximal = [n for n in inside if parent(n, of) not in inside]
            assert sorted(maximal) == list(tiles)


def test_cover_refuses_what_lies_outside() -> None:
    for lo, hi in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ValueError, match="no range of 5 slices"):
            cover(lo, hi, 5)


def test_cover_of_a_huge_step_is_short() -> None:
    assert len(cover(1, 10**9 - 1, 10**9)) < 64


def test_fold_order_is_fixed_and_takes_one_node_too() -> None:
    assert fold_order([(2, 3), (0, 2), (3, 4)], 4) == [((2, 3), (3, 4), (2, 4)), ((0, 2), (2, 4), (0, 4))]
    assert fold_order([(4, 5), (5, 6)], 7) == [((4, 5), (5, 6), (4, 6))]
    assert fold_order([(0, 7)], 7) == []


@pytest.mark.parametrize(
    "nodes",
    [[], [(0, 1), (2, 3), (3, 4)], [(0, 2), (0, 4)], [(1, 2), (2, 3)], [(0, 1), (1, 3), (3, 4)], [(0, 1), (0, 1)]],
)
def test_fold_order_refuses_what_is_no_tiling(nodes: list[Node]) -> None:
    with pytest.raises(ValueError, match=r"no node|do not tile|nothing to fold"):
        fold_order(nodes, 4)


def test_what_is_there_is_a_duplicate_and_what_contains_replaces() -> None:
    """A worker brings a subtree of which others brought parts.

    1. Slices 0, 1 and [2, 4) arrive.
    2. [0, 2) is wholly there, in two parts: a duplicate; so is slice 3, inside [2, 4).
    3. Slice 5 arrives, then [4, 8), which replaces it; the step is complete.
    """
    reducer = Reducer(8)
    assert (reducer.complete, reducer.missing) == (False, ((0, 8),))
    assert [reducer.add(n) for n in ((1, 2), (0, 1), (2, 4))] == [NEW] * 3
    assert [reducer.add(n) for n in ((0, 2), (3, 4), (2, 4), (0, 1), (0, 4))] == [DUPLICATE] * 5
    assert reducer.add((5, 6)) == NEW
    assert list(reducer.missing) == [(4, 5), (6, 8)]
    assert reducer.add((4, 8)) == ((5, 6),)
    assert list(reducer.held) == [(0, 1), (1, 2), (2, 4), (4, 8)]
    assert reducer.complete
    assert list(reducer.missing) == []
    assert reducer.add((0, 8)) == DUPLICATE


def test_a_larger_node_replaces_only_parts() -> None:
    reducer = Reducer(6)
    for node in ((0, 1), (3, 4), (4, 5)):
        reducer.add(node)
    assert reducer.add((0, 4)) == ((0, 1), (3, 4))
    assert reducer.held == ((0, 4), (4, 5))
    assert reducer.missing == ((5, 6),)


def test_reducer_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="no node"):
        Reducer(4).add((1, 3))
    with pytest.raises(ValueError, match="at least one slice"):
        Reducer(0)


@pytest.mark.parametrize("of", [2, 3, 5, 6])
def test_every_order_of_arrival_gives_the_same_sum(of: int) -> None:
    """All slices in every order, each followed at once by the subtree above it."""
    orders = list(permutations(range(of)))
    for order in random.Random(of).sample(orders, min(len(orders), 120)):
        arrivals = [n for i in order for n in ((i, i + 1), parent((i, i + 1), of)) if n is not None]
        assert arrive(arrivals, of) == halves(0, of)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.data())
def test_any_mix_of_nodes_gives_the_same_sum(of: int, data: st.DataObject) -> None:
    """Random nodes, nested and repeated, then all leaves: the expression is the same."""
    nodes = all_nodes(of)
    arrivals = data.draw(st.lists(st.sampled_from(nodes), max_size=2 * of)) + [(i, i + 1) for i in range(of)]
    assert arrive(arrivals, of) == halves(0, of)


def arrive(arrivals: list[Node], of: int) -> object:
    """A shell around a Reducer: keeps sums, drops what it is told, and checks that names and sums agree."""
    reducer = Reducer(of)
    sums: Sums = {}
    for node in arrivals:
        there = {i for lo, hi in sums for i in range(lo, hi)}
        added = reducer.add(node)
        assert (added is None) == (set(range(*node)) <= there)
        if added is not None:
            for gone in added:
                del sums[gone]
            sums[node] = subtree(node, of)
        assert reducer.held == tuple(sorted(sums))
        assert [i for lo, hi in reducer.missing for i in range(lo, hi)] == sorted(
            set(range(of)) - {i for lo, hi in sums for i in range(lo, hi)}
        )
    assert reducer.complete
    perform(fold_order(reducer.held, of), sums)
    (total,) = sums.values()
    return total


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.data())
def test_workers_and_server_together_add_as_one_process_does(of: int, data: st.DataObject) -> None:
    """Random ranges for the workers; each adds its own slices, the server the rest, in any order."""
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, of), max_size=8))), of]
    pushed: Sums = {}
    for lo, hi in pairwise(cuts):
        pushed |= {node: subtree(node, of) for node in cover(lo, hi, of)}
    server = Reducer(of)
    for node in data.draw(st.permutations(sorted(pushed))):
        assert server.add(node) == NEW
    assert server.complete
    perform(fold_order(server.held, of), pushed)
    assert pushed == {(0, of): halves(0, of)}
