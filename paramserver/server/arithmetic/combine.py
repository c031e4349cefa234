"""The sum of contributions in the fixed tree, a tile at a time: the caller uses each tile while it is in cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat

import torch
from torch import Tensor

from paramserver.core.versions.reduction import Node, fold_order
from paramserver.kernels.library import COPY, Formula, Recipe, exact_reciprocal
from paramserver.server.arithmetic import compiled

# Elements that are summed, and then used, at a time: few enough to stay in a core's caches, many enough that reading
# from main memory gets up to speed. A multiple of 64, so that vector instructions cover the same elements as if there
# were no tiles.
TILE = 262144


class Scratch(threading.local):
    """Scratch memory of the calling thread. Each use overwrites the numbers of the previous one."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[torch.dtype, int], Tensor] = {}
        self._flat: dict[torch.dtype, Tensor] = {}

    def tile(self, dtype: torch.dtype, number: int) -> Tensor:
        """``TILE`` elements."""
        if (dtype, number) not in self._tiles:
            self._tiles[dtype, number] = torch.empty(TILE, dtype=dtype)
        return self._tiles[dtype, number]

    def flat(self, dtype: torch.dtype, elements: int) -> Tensor:
        """So many elements, for a whole chunk."""
        if dtype not in self._flat or self._flat[dtype].numel() < elements:
            self._flat[dtype] = torch.empty(elements, dtype=dtype)
        return self._flat[dtype][:elements]


scratch = Scratch()


class Sum:
    """The sum of tensors in the fixed tree over ``[0, of)``, divided by ``divisor``; computed as it is asked for.

    ``nodes`` tile the tree, or one node of it, in any order; the tensors are flat, of one length and dtype, and are
    only read. The bits do not depend on which process has added up which nodes. The divisor is the samples of the step,
    or 1; it divides, since a product with its reciprocal would round twice. ``look``: note whether the computed tiles
    are finite. ``kept``: memory as long as the sum, where what is computed is left, too. Raises ValueError if the nodes
    do not tile.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Node, Tensor]],
        of: int = 1,
        divisor: float = 1.0,
        look: bool = False,
        kept: Tensor | None = None,
    ) -> None:
        self._tensors = [tensor for _, tensor in nodes]
        names = tuple([node for node, _ in nodes])
        assert len(set(names)) == len(names), "a node comes twice"
        self._recipe = _recipe(names, of)
        self._divisor = divisor
        # The sum of the computed tiles, and how many elements they have, if they are looked at.
        self._look, self._seen, self._looked = look, 0.0, 0
        self._kept = kept

    @staticmethod
    def of(tensor: Tensor) -> Sum:
        """A sum that is computed already."""
        return Sum([((0, 1), tensor)])

    @property
    def like(self) -> Tensor:
        """A tensor of the length and dtype of the sum."""
        return self._tensors[0]

    @property
    def ready(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._recipe and self._divisor == 1.0

    @property
    def kept(self) -> bool:
        """Whether what is computed is left somewhere, too."""
        return self._kept is not None

    @property
    def finite(self) -> bool:
        """False if a computed tile is not finite, or adds up to more than its type can hold."""
        return math.isfinite(self._seen)

    @property
    def all_finite(self) -> bool:
        """Whether every tile was computed and looked at, and all numbers in the tensors are finite."""
        return self._looked >= self.like.numel() and self.finite

    def whole(self, out: Tensor | None = None) -> Tensor:
        """The whole sum, in ``out`` or ``kept`` if given; else new, or the input if there is nothing to compute."""
        out = self._kept if out is None else out
        if out is None and self.ready:
            for _ in self.tiles(0, self.like.numel() if self._look else 0):
                pass
            return self.like
        total = torch.empty_like(self.like) if out is None else out
        pieces = split(total)
        for tile, piece in zip(self._made(0, total.numel(), pieces), pieces, strict=True):
            if tile is not piece:
                piece.copy_(tile)
        return total

    def update(self, formula: Formula, start: int, weights: Tensor, out: Tensor, state: Sequence[Tensor] = ()) -> bool:
        """As many elements as ``out`` has, from ``start`` on, go through a compiled formula in one pass over memory.

        ``weights``: the old ones, ``out``: the new ones, ``state``: changed in place; all flat and without gaps. False
        if there is no such kernel here: then nothing has happened.
        """
        kernels = compiled.kernels()
        if kernels is None or not kernels.can(formula, self._tensors, self._recipe):
            return False
        self._go_through(kernels, formula, start, weights, out, state, self._kept)
        return True

    def tiles(self, start: int, stop: int) -> Iterator[Tensor]:
        """Elements ``start`` to ``stop``, ``TILE`` at a time; each tile is good until the next one is asked for."""
        if self._kept is None:
            yield from self._made(start, stop, repeat(None))
            return
        pieces = split(self._kept[start:stop])
        for tile, piece in zip(self._made(start, stop, pieces), pieces, strict=True):
            if tile is not piece:
                piece.copy_(tile)
            yield piece

    def _made(self, start: int, stop: int, into: Iterable[Tensor | None]) -> Iterator[Tensor]:
        kernels = compiled.kernels()
        if not self.ready and kernels is not None and kernels.can(COPY, self._tensors, self._recipe):
            yield from self._copied(kernels, start, stop, into)
            return
        rows = [split(tensor[start:stop]) for tensor in self._tensors]
        dtype, divided = self.like.dtype, self._divisor != 1.0
        wanted = max((place for *_, place in self._recipe), default=len(rows) if divided else -1) + 1 - len(rows)
        own = [scratch.tile(dtype, number) for number in range(wanted)]
        for *parts, out in zip(*rows, into, strict=False):
            size = parts[0].numel()
            places = [*parts, *(own if size == TILE else [tile[:size] for tile in own])]
            tile = places[0]
            for number, (one, other, place) in enumerate(self._recipe, 1):
                tile = places[place] if out is None or number < len(self._recipe) else out
                torch.add(places[one], places[other], out=tile)
            if divided:
                target = tile if self._recipe else places[-1] if out is None else out
                tile = self._quotient(tile, target)
            if self._look:
                self._seen += tile.sum().item()
                self._looked += tile.numel()
            yield tile

    def _copied(
        self, kernels: compiled.Compiled, start: int, stop: int, into: Iterable[Tensor | None]
    ) -> Iterator[Tensor]:
        for at, place in zip(range(start, stop, TILE), into, strict=False):
            out = scratch.tile(self.like.dtype, 0)[: stop - at] if place is None else place
            self._go_through(kernels, COPY, at, None, out)
            yield out

    def _go_through(
        self,
        kernels: compiled.Compiled,
        formula: Formula,
        start: int,
        weights: Tensor | None,
        out: Tensor,
        state: Sequence[Tensor] = (),
        kept: Tensor | None = None,
    ) -> None:
        library, left = kernels.library, None if kept is None else kept[start : start + out.numel()]
        seen = library.step(self._tensors, start, self._recipe, self._divisor, formula, weights, out, state, left)
        if self._look:
            self._seen += seen
            self._looked += out.numel()

    def _quotient(self, tile: Tensor, out: Tensor) -> Tensor:
        factor = exact_reciprocal(self._divisor)
        return torch.mul(tile, factor, out=out) if factor else torch.div(tile, self._divisor, out=out)


def combine(nodes: Sequence[tuple[Node, Tensor]], of: int, divisor: float, out: Tensor | None = None) -> Tensor:
    """The whole sum at once; see :class:`Sum`."""
    return Sum(nodes, of, divisor).whole(out)


def split(tensor: Tensor) -> Sequence[Tensor]:
    """A flat tensor as tiles."""
    return (tensor,) if 0 < tensor.numel() <= TILE else torch.split(tensor, TILE) if tensor.numel() else ()


@lru_cache(maxsize=256)
def _recipe(nodes: tuple[Node, ...], of: int) -> Recipe:
    """Which terms to add, and where to put the sums: the same for all chunks of a step, and often for the next step.

    Places below ``len(nodes)`` are the tensors that are given, others are tiles of scratch memory, as few as possible.
    """
    places = {node: number for number, node in enumerate(nodes)}
    given = end = len(nodes)
    free: list[int] = []
    steps = []
    for left, right, result in fold_order(nodes, of):
        one, other = places[left], places[right]
        done = [place for place in (one, other) if place >= given]
        if done:
            into = done.pop()
        elif free:
            into = free.pop()
        else:
            into, end = end, end + 1
        free += done
        places[result] = into
        steps.append((one, other, into))
    return tuple(steps)
