"""Arithmetic on chunks: contributions are combined, and the optimizer makes the next weights of a chunk.

Everything here is a function of its arguments (and of the optimizer state of the chunk), whoever calls it and in
whichever process. Results are new tensors; weights and gradients that come in are only read.

A chunk is updated in *runs*: the pieces of it that have the same history share one run, with the padding between them,
and the optimizer sees each run as one parameter. Usually that is the whole chunk. Pieces whose tensor has no gradient
in a step are left out, as torch leaves such parameters out, and from then on differ from the rest in their step count.
How a chunk falls into runs depends on the state and on what is used, not on how the state came about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paramserver.core.hypers import RULES, Hypers
from paramserver.core.plan import Chunk, Kind
from paramserver.core.reduction import Merge, Node, fold_order
from paramserver.errors import ModelError
from paramserver.tensors.dtypes import torch_dtype
from paramserver.tensors.optimizers import FUSED, build
from paramserver.tensors.uncompiled import step

# (tensor, key, first element in the tensor, data, one number for the whole tensor)
StateEntry = tuple[int, str, int, Tensor, bool]

# With an epsilon below this, padding could become 0 / 0 and is kept out of the runs.
_SMALL_EPS = 1e-30
# Elements that are combined, or updated by an optimizer without a fused kernel, at a time: they are passed over several
# times and should stay in cache.
_TILE = 131072
_UNFUSED_TILE = 65536


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements ``start`` to ``stop`` of the chunk, in the pieces ``first`` to ``last`` (exclusive)."""

    start: int
    stop: int
    first: int
    last: int
    fresh: bool
    param: Tensor


@dataclass(frozen=True, slots=True)
class _Runs:
    """A torch optimizer set up for what is used; while it exists, it owns the state of the pieces in its runs."""

    mask: tuple[bool, ...]
    exact: bool
    runs: tuple[_Run, ...]
    optimizer: torch.optim.Optimizer


class ChunkState:
    """The optimizer state of one chunk of parameters. Memory for it is taken as torch does, when first needed."""

    def __init__(self, chunk: Chunk, optimizer: str) -> None:
        """Raises ModelError if the optimizer is not allow-listed."""
        assert chunk.kind is Kind.PARAMETER, chunk.kind
        if optimizer not in RULES:
            raise ModelError(f"optimizer {optimizer[:40]!r} is not supported; use one of {', '.join(RULES)}")
        self.chunk = chunk
        self.optimizer = optimizer
        self._rule = RULES[optimizer]
        self._dtype = torch_dtype(chunk.dtype)
        self._tensors = tuple(piece.tensor for piece in chunk.pieces)
        # State by piece, as far as `_runs` does not hold it. Arrays are as long as the chunk.
        self._arrays: dict[str, Tensor] = {}
        self._scalars: list[dict[str, Tensor]] = [{} for _ in chunk.pieces]
        self._keys: list[frozenset[str]] = [frozenset() for _ in chunk.pieces]
        self._structure: dict[str, bool] | None = None
        self._runs: _Runs | None = None
        self._nothing = torch.empty(0, dtype=self._dtype)

    def step(
        self, weights: Tensor, gradient: Tensor, used: Collection[int], hypers: Hypers, out: Tensor | None = None
    ) -> Tensor:
        """The next weights of the chunk, in new memory (or in ``out``); updates the state.

        ``weights`` and ``gradient``: flat, ``chunk.elements`` long, in the chunk's dtype; padding is zero in both and
        stays so. ``used``: tensors (by index) that have a gradient; others keep weights and state. If none has, the
        result is ``weights`` itself. ``hypers``: valid for this optimizer (`core.hypers.validate`). For "sum" the
        gradient is the sum of what was pushed, for all others a mean.

        Raises ModelError, and changes nothing, if ``hypers`` asks for state that was not kept from the beginning.
        """
        assert weights.shape == gradient.shape == (self.chunk.elements,), (weights.shape, gradient.shape)
        assert weights.dtype == gradient.dtype == self._dtype, (weights.dtype, gradient.dtype)
        mask = tuple([tensor in used for tensor in self._tensors])
        if not any(mask):
            return weights
        structure = self._checked_structure(hypers)
        if self.optimizer == "sgd" and all(mask) and _plain(hypers):
            # The same bits as the optimizer's, in one pass over the memory.
            self._structure = structure
            lr = hypers["lr"]
            assert isinstance(lr, float | int)
            return torch.add(weights, gradient, alpha=-lr, out=out)
        if out is None:
            new = weights.clone()
        else:
            assert out is not weights
            new = out.copy_(weights)
        if self.optimizer == "sum":
            if all(mask):
                return new.add_(gradient)
            for piece, wanted in zip(self.chunk.pieces, mask, strict=True):
                if wanted:
                    span = slice(piece.chunk_start, piece.chunk_start + piece.elements)
                    new[span] += gradient[span]
            return new
        self._structure = structure
        eps = hypers.get("eps", 1.0)
        assert isinstance(eps, float | int)
        exact = eps < _SMALL_EPS
        current = self._runs
        if current is None or current.mask != mask or current.exact != exact:
            self._collect()
            current = self._runs = self._arrange(weights, mask, exact, hypers)
        for group in current.optimizer.param_groups:
            for key in self._rule.fields:
                group[key] = hypers[key]
        for run in current.runs:
            run.param.data = new[run.start : run.stop]
            run.param.grad = gradient[run.start : run.stop]
        step(current.optimizer)
        for run in current.runs:
            run.param.grad = None
            run.param.data = self._nothing
        if len(current.runs) > 1 and any(run.fresh and run.param in current.optimizer.state for run in current.runs):
            self._collect()  # those that were fresh now have a history, perhaps the same one as their neighbours
        return new

    def export(self) -> Iterator[StateEntry]:
        """The state by piece: tensor, key, first element in the tensor, data, whether it is one number for all of it.

        In the order of the pieces, and of the keys within a piece; pieces that were never used have none. Numbers for
        the whole tensor begin at 0 and come with every piece of the tensor. The data are views of the live state: use
        them up before the next step, also those not yet asked for.
        """
        self._collect()
        for index, piece in enumerate(self.chunk.pieces):
            scalars = self._scalars[index]
            for key in sorted({*scalars, *self._keys[index]}):
                if key in scalars:
                    yield piece.tensor, key, 0, scalars[key].reshape(1), True
                else:
                    span = slice(piece.chunk_start, piece.chunk_start + piece.elements)
                    yield piece.tensor, key, piece.tensor_start, self._arrays[key][span], False

    def load(self, entries: Iterable[StateEntry]) -> None:
        """Replaces the state by copies of what `export` gave, in any order; also of larger or smaller parts of tensors.

        Parts of tensors outside this chunk are left out. Raises ModelError, and changes nothing, if the entries are not
        the complete state of this optimizer for every piece that has any.
        """
        pieces = {piece.tensor: index for index, piece in enumerate(self.chunk.pieces)}
        arrays: dict[str, Tensor] = {}
        scalars: list[dict[str, Tensor]] = [{} for _ in pieces]
        filled: list[dict[str, int]] = [{} for _ in pieces]
        for tensor, key, start, data, scalar in entries:
            index = pieces.get(tensor)
            if index is None:
                continue
            if key not in (self._rule.scalars if scalar else self._rule.arrays):
                raise ModelError(f"optimizer {self.optimizer} has no state {key[:40]!r}; load what it saved")
            if scalar:
                scalars[index][key] = data.detach().clone().reshape(())
                continue
            piece = self.chunk.pieces[index]
            lo = max(start, piece.tensor_start)
            hi = min(start + data.numel(), piece.tensor_start + piece.elements)
            if lo >= hi:
                continue
            if key not in arrays:
                arrays[key] = torch.zeros(self.chunk.elements, dtype=self._dtype)
            at = piece.chunk_start + lo - piece.tensor_start
            arrays[key][at : at + hi - lo] = data.reshape(-1)[lo - start : hi - start]
            filled[index][key] = filled[index].get(key, 0) + hi - lo
        structure = self._loaded_structure(scalars, filled)
        self._arrays, self._scalars = arrays, scalars
        self._keys = [frozenset(keys) for keys in filled]
        self._structure, self._runs = structure, None

    def _checked_structure(self, hypers: Hypers) -> dict[str, bool]:
        structure = {key: bool(hypers[key]) for key in self._rule.structural}
        if self._structure is not None and structure != self._structure:
            raise ModelError(
                f"optimizer {self.optimizer}: {' and '.join(structure)} cannot be switched on or off during training;"
                " begin a new job for that"
            )
        return structure

    def _loaded_structure(
        self, scalars: Sequence[dict[str, Tensor]], filled: Sequence[dict[str, int]]
    ) -> dict[str, bool] | None:
        """Which optional arrays the loaded state has, None if it has nothing. Raises ModelError if it is incomplete."""
        optional = frozenset(self._rule.structural.values())
        kept = frozenset(key for counts in filled for key in counts) & optional
        needed = (self._rule.arrays - optional) | kept
        started = False
        for piece, numbers, counts in zip(self.chunk.pieces, scalars, filled, strict=True):
            if not numbers and not counts:
                continue
            started = True
            for key in sorted(needed | self._rule.scalars):
                if key not in numbers and counts.get(key) != piece.elements:
                    raise ModelError(f"optimizer state {key} of tensor {piece.tensor} is incomplete; load all of it")
        return {hyper: key in kept for hyper, key in self._rule.structural.items()} if started else None

    def _arrange(self, weights: Tensor, mask: tuple[bool, ...], exact: bool, hypers: Hypers) -> _Runs:
        """Sets a torch optimizer up for the pieces in ``mask``, with neighbours of the same history in one run."""
        pieces = self.chunk.pieces
        ends = [piece.chunk_start for piece in pieces[1:]] + [self.chunk.elements]
        histories = [self._history(index) if wanted else None for index, wanted in enumerate(mask)]
        runs: list[_Run] = []
        states: list[dict[str, Tensor]] = []
        first = 0
        while first < len(pieces):
            last = first + 1
            if mask[first]:
                while not exact and last < len(pieces) and histories[last] == histories[first]:
                    last += 1
                start = pieces[first].chunk_start
                stop = start + pieces[first].elements if exact else ends[last - 1]
                tile = stop - start if self.optimizer in FUSED else _UNFUSED_TILE
                for lo in range(start, stop, tile):
                    hi = min(lo + tile, stop)
                    state = {key: number.clone() for key, number in self._scalars[first].items()}
                    state |= {key: self._arrays[key][lo:hi] for key in self._keys[first]}
                    runs.append(_Run(lo, hi, first, last, not state, weights[lo:hi].detach()))
                    states.append(state)
            first = last
        # Separate groups, since torch's fused SGD takes momentum buffers for all parameters of a group or for none.
        groups = [[run.param for run in runs if run.fresh == fresh] for fresh in (False, True)]
        optimizer = build(self.optimizer, groups, hypers)
        for run, state in zip(runs, states, strict=True):
            if state:
                optimizer.state[run.param] = state
        return _Runs(mask, exact, tuple(runs), optimizer)

    def _history(self, index: int) -> tuple[object, ...]:
        """What pieces must have in common to be updated as one parameter."""
        numbers = sorted((key, number.item()) for key, number in self._scalars[index].items())
        return (*numbers, *sorted(self._keys[index]))

    def _collect(self) -> None:
        """Takes the state back from the torch optimizer."""
        current, self._runs = self._runs, None
        if current is None:
            return
        for run in current.runs:
            state: dict[str, Tensor] = current.optimizer.state.get(run.param, {})
            for key, value in state.items():
                if key in self._rule.scalars:
                    for index in range(run.first, run.last):
                        self._scalars[index][key] = value.clone()
                    continue
                self._keep(run, key, value)
                for index in range(run.first, run.last):
                    self._keys[index] |= {key}

    def _keep(self, run: _Run, key: str, value: Tensor) -> None:
        if run.start == 0 and run.stop == self.chunk.elements:
            self._arrays[key] = value
            return
        if key not in self._arrays:
            self._arrays[key] = torch.zeros(self.chunk.elements, dtype=self._dtype)
        place = self._arrays[key][run.start : run.stop]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)


def _plain(hypers: Hypers) -> bool:
    """SGD without anything, which has no state."""
    return not any(hypers[key] for key in ("momentum", "weight_decay", "nesterov", "maximize"))


def combine(nodes: Sequence[tuple[Node, Tensor]], of: int, divisor: float, out: Tensor | None = None) -> Tensor:
    """The sum of the tensors in the fixed tree over ``[0, of)``, divided by ``divisor``.

    ``nodes`` tile the tree, or one node of it, in any order; the tensors are flat, of one length and dtype, and are
    only read. Whoever added which nodes before, the bits are the same. The divisor is the samples of the step, or 1;
    it divides, since a product with its reciprocal would round twice. The result goes into ``out`` if given. Otherwise
    it is a new tensor, or the input itself where there is just one and nothing to divide. Beside the result only small
    scratch memory is taken. Raises ValueError if the nodes do not tile.
    """
    tensors = dict(nodes)
    assert len(tensors) == len(nodes), "a node comes twice"
    merges = _merges(tuple(tensors), of)
    first = nodes[0][1]
    if not merges:
        if divisor != 1.0:
            return torch.div(first, divisor, out=out)
        return first if out is None else out.copy_(first)
    total = torch.empty_like(first) if out is None else out
    # Every node's tensor as a row of tiles; partial sums share a few scratch tiles.
    rows = {node: _tiles(tensor) for node, tensor in tensors.items()}
    partial: set[Node] = set()
    free: list[tuple[Tensor, ...]] = []
    sums: list[tuple[tuple[Tensor, ...], ...]] = []
    for left, right, result in merges:
        done = [rows[node] for node in (left, right) if node in partial]
        if result == merges[-1][2]:
            into = _tiles(total)
        elif done:
            into = done.pop()
        elif free:
            into = free.pop()
        else:
            scratch = torch.empty_like(total[:_TILE])
            into = tuple([scratch[: tile.numel()] for tile in rows[left]])
        free += done
        sums.append((rows[left], rows[right], into))
        rows[result] = into
        partial.add(result)
    for number, tile in enumerate(rows[merges[-1][2]]):
        for one, other, into in sums:
            torch.add(one[number], other[number], out=into[number])
        if divisor != 1.0:
            tile.div_(divisor)
    return total


@lru_cache(maxsize=256)
def _merges(nodes: tuple[Node, ...], of: int) -> tuple[Merge, ...]:
    """The same for all chunks of a step, and often for the next step."""
    return tuple(fold_order(nodes, of))


def _tiles(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,) if tensor.numel() <= _TILE else torch.split(tensor, _TILE)


def apply_buffers(old: Tensor, change: Tensor, out: Tensor | None = None) -> Tensor:
    """The next buffers: old plus the mean change of the slices. All flat, of one length and dtype."""
    return torch.add(old, change, out=out)
