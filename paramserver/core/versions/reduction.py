"""The fixed tree in which the contributions of a step are added, and the nodes of it that are held.

Floating-point addition depends on its order, so the order is fixed once, by slice index alone. The slices ``[0, of)``
are halved again and again, each time at the largest power of two below the length; that is the same as pairing
neighbours level by level, where one without a neighbour moves up as it is. Every range that arises is a *node*:

    of = 5:                [0,5)
                     [0,4)       [4,5)
                [0,2)    [2,4)
               0    1    2    3    4

A process that holds both halves of a node may add them. The sum has the same bits in every process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from paramserver.core.versions.ranges import complement

Node = tuple[int, int]
Merge = tuple[Node, Node, Node]  # left half, right half, their sum


def is_node(lo: int, hi: int, of: int) -> bool:
    """True if ``[lo, hi)`` is a node of the tree over ``[0, of)``. Takes any numbers, also nonsense."""
    if not 0 <= lo < hi <= of:
        return False
    level = _level(hi - lo)
    return lo % level == 0 and (hi - lo == level or hi == of)


def split(node: Node, of: int) -> tuple[Node, Node]:
    """The two halves of a node. Raises ValueError if it is a single slice, or no node."""
    lo, hi = _checked(node, of)
    if hi - lo == 1:
        raise ValueError(f"slice {lo} is a leaf of the reduction tree and has no halves")
    middle = lo + _level(hi - lo) // 2
    return (lo, middle), (middle, hi)


def parent(node: Node, of: int) -> Node | None:
    """The node of which this one is a half; None for the whole. Raises ValueError if it is no node."""
    lo, hi = _checked(node, of)
    if hi - lo == of:
        return None
    level = _level(hi - lo)
    while True:  # one without a neighbour on its level moves up, which changes its level and not its range
        level *= 2
        start = lo - lo % level
        above = (start, min(start + level, of))
        if above != node:
            return above


def sibling(node: Node, of: int) -> Node | None:
    """The other half of the node's parent; None for the whole. Raises ValueError if it is no node."""
    above = parent(node, of)
    if above is None:
        return None
    left, right = split(above, of)
    return right if left == node else left


def cover(lo: int, hi: int, of: int) -> tuple[Node, ...]:
    """The fewest nodes that tile ``[lo, hi)``, sorted: a worker that has these slices pushes one contribution per node.

    Raises ValueError if the range does not lie in ``[0, of)``; an empty range has no nodes.
    """
    if not 0 <= lo <= hi <= of:
        raise ValueError(f"[{lo}, {hi}) is no range of {of} slices: give 0 <= lo <= hi <= {of}")
    nodes = []
    while lo < hi:
        level = lo & -lo or _level(of)  # the largest that may begin here
        while min(lo + level, of) > hi:
            level //= 2
        nodes.append((lo, min(lo + level, of)))
        lo += level
    return tuple(nodes)


def fold_order(nodes: Sequence[Node], of: int) -> list[Merge]:
    """The merges that reduce ``nodes`` to one, in the order in which to do them: depth first, left before right.

    ``nodes`` tile ``[0, of)`` or a single node of it, and may come in any order. Raises ValueError if they do not.
    """
    given = sorted(nodes)
    if not given:
        raise ValueError("there is nothing to fold: give at least one node")
    whole = _checked((given[0][0], given[-1][1]), of)
    at = whole[0]
    for node in given:
        _checked(node, of)
        if node[0] != at:
            raise ValueError(f"the nodes do not tile [{whole[0]}, {whole[1]}): at slice {at} comes {node}")
        at = node[1]
    merges: list[Merge] = []
    stack: list[Node] = []
    for node in given:
        stack.append(node)
        # A right half is complete only when it ends where its parent ends, and then its left half lies below it.
        while len(stack) > 1 and stack[-2] == sibling(stack[-1], of):
            right, left = stack.pop(), stack.pop()
            stack.append((left[0], right[1]))
            merges.append((left, right, stack[-1]))
    assert stack == [whole], f"{given} of {of} folds to {stack}"
    return merges


class Reducer:
    """The nodes of one step that are held. Names only: the caller keeps the bytes, and drops what :meth:`add` says."""

    def __init__(self, of: int) -> None:
        """A step of ``of`` slices. Raises ValueError if there are none."""
        if of < 1:
            raise ValueError(f"a step has at least one slice, not {of}")
        self.of = of
        self._held: list[Node] = []  # sorted, disjoint
        self._covered = 0

    def add(self, node: Node) -> tuple[Node, ...] | None:
        """Take a node in, and return the nodes that it contains, which are dropped.

        None if the node is a duplicate: all of its slices are covered already. Raises ValueError if it is no node.
        """
        lo, hi = _checked(node, self.of)
        # Nodes are nested or disjoint: a node that begins before this one contains it or ends before it.
        first = bisect_left(self._held, (lo, lo))
        if first and self._held[first - 1][1] >= hi:
            return None
        if first < len(self._held) and self._held[first][0] == lo and self._held[first][1] >= hi:
            return None
        last = bisect_left(self._held, (hi, hi))
        inside = tuple(self._held[first:last])
        there = sum(stop - start for start, stop in inside)
        if there == hi - lo:
            return None
        self._held[first:last] = [(lo, hi)]
        self._covered += hi - lo - there
        return inside

    @property
    def held(self) -> tuple[Node, ...]:
        """The nodes held, sorted; they never overlap."""
        return tuple(self._held)

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """The slices not covered yet, as half-open ranges, sorted, neighbours joined."""
        return tuple(complement(self._held, self.of))

    @property
    def complete(self) -> bool:
        """True if every slice is covered."""
        return self._covered == self.of


def _level(length: int) -> int:
    """The smallest power of two that is at least ``length``."""
    return 1 << (length - 1).bit_length()


def _checked(node: Node, of: int) -> Node:
    lo, hi = node
    if not is_node(lo, hi, of):
        raise ValueError(f"[{lo}, {hi}) of {of} slices is no node of the reduction tree")
    return node
