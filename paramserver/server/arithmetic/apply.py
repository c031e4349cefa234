"""Arithmetic on chunks: the optimizer makes the next weights of a chunk out of the sum of contributions.

Everything here is a function of its arguments and of the optimizer state of the chunk. Results are new tensors; weights
and gradients that come in are only read. Where torch has a fused kernel, a tile is summed and updated before the next
one, so that nothing but what must be read and written passes through main memory.

A chunk is updated in *runs*: the pieces of it that have the same history share one run, with the padding between them,
and the optimizer sees each run as one parameter. Usually that is the whole chunk. Pieces whose tensor has no gradient
in a step are left out, as torch leaves such parameters out, and from then on differ from the rest in their step count.
How a chunk falls into runs depends on the state and on what is used, not on how the state came about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paramserver.core.layout.hypers import Hypers, rule_of
from paramserver.core.layout.plan import Chunk, Kind
from paramserver.errors import ModelError
from paramserver.kernels.library import Formula
from paramserver.kernels.library import Kind as Step
from paramserver.server.arithmetic.combine import Sum, scratch, split
from paramserver.server.arithmetic.fused import Kernel, kernel_of
from paramserver.server.arithmetic.state import StateEntry
from paramserver.tensors.dtypes import torch_dtype
from paramserver.tensors.optimizers import build, check_state, given_numbers, kept_numbers, torch_hypers
from paramserver.tensors.private import FUSED
from paramserver.tensors.uncompiled import step

# With an epsilon below this, padding could become 0 / 0 and is kept out of the runs.
_SMALL_EPS = 1e-30
# Elements that are updated at a time by an optimizer without a fused kernel: they are passed over several times and
# should stay in cache.
_UNFUSED_TILE = 65536


@dataclass(slots=True)
class _Run:
    """Elements ``start`` to ``stop`` of the chunk, in the pieces ``first`` to ``last`` (exclusive), and their history.

    ``numbers``: state that is one number. ``keys``: state arrays that have begun. ``param``: the run as a
    parameter of the optimizer, where there is no fused kernel.
    """

    start: int
    stop: int
    first: int
    last: int
    numbers: dict[str, Tensor]
    keys: frozenset[str]
    param: Tensor

    @property
    def fresh(self) -> bool:
        """Whether it has no history yet."""
        return not self.numbers and not self.keys


@dataclass(frozen=True, slots=True)
class _Runs:
    """The optimizer of a set of pieces, kept as long as the same pieces are used. It owns the history of these pieces.

    ``optimizer``: None where there is a fused kernel, which needs none.
    """

    mask: tuple[bool, ...]
    exact: bool
    runs: tuple[_Run, ...]
    optimizer: torch.optim.Optimizer | None


class ChunkState:
    """The optimizer state of one chunk of parameters. Memory for it is taken as torch does, when first needed."""

    def __init__(self, chunk: Chunk, optimizer: str) -> None:
        """Raises ModelError if the optimizer is not allow-listed."""
        assert chunk.kind is Kind.PARAMETER, chunk.kind
        self._rule = rule_of(optimizer)
        self.chunk = chunk
        self.optimizer = optimizer
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
        self, weights: Tensor, gradient: Tensor | Sum, used: Collection[int], hypers: Hypers, out: Tensor | None = None
    ) -> Tensor:
        """The next weights of the chunk, in new memory (or in ``out``); updates the state.

        ``weights`` and ``gradient``: flat, ``chunk.elements`` long, in the chunk's dtype; padding is zero in both and
        stays so. ``used``: tensors (by index) that have a gradient; others keep weights and state. If none has, the
        result is ``weights`` itself. ``hypers``: valid for this optimizer (`core.hypers.validate`). For "sum" the
        gradient is the sum of what was pushed, for all others a mean.

        Raises ModelError, and changes nothing, if ``hypers`` asks for state that was not kept from the beginning.
        """
        summed = gradient if isinstance(gradient, Sum) else Sum.of(gradient)
        like = summed.like
        assert weights.shape == like.shape == (self.chunk.elements,), (weights.shape, like.shape)
        assert weights.dtype == like.dtype == self._dtype, (weights.dtype, like.dtype)
        mask = tuple([tensor in used for tensor in self._tensors])
        if not any(mask):
            return weights
        assert out is not weights
        structure = self._checked_structure(hypers)
        new = torch.empty_like(weights) if out is None else out
        if self.optimizer == "sum":
            self._add(weights, summed, mask, 1.0, new)
            return new
        self._structure = structure
        if self.optimizer == "sgd" and all(mask) and _plain(hypers):
            # The same bits as the optimizer's, in one pass over the memory.
            self._add(weights, summed, mask, -_number(hypers["lr"]), new)
            return new
        exact = _number(hypers.get("eps", 1.0)) < _SMALL_EPS
        current = self._runs
        if current is None or current.mask != mask or current.exact != exact:
            self._collect()
            current = self._runs = self._arrange(weights, mask, exact, hypers)
        fresh = [run for run in current.runs if run.fresh]
        if current.optimizer is None:
            self._update_fused(current, weights, summed, kernel_of(self.optimizer, hypers), new)
        else:
            self._update(current.runs, current.optimizer, weights, summed, hypers, new)
        if len(current.runs) > 1 and any(not run.fresh for run in fresh):
            self._collect()  # those that were fresh now have a history, perhaps the same one as their neighbours
        return new

    def _add(self, weights: Tensor, summed: Sum, mask: tuple[bool, ...], factor: float, new: Tensor) -> None:
        """Weights plus factor × gradient, where the mask says so."""
        spans = [(0, self.chunk.elements)]
        if not all(mask):
            new.copy_(weights)
            used = [piece for piece, wanted in zip(self.chunk.pieces, mask, strict=True) if wanted]
            spans = [(piece.chunk_start, piece.chunk_start + piece.elements) for piece in used]
        for start, stop in spans:
            if summed.update(Formula(Step.ADD, (factor,)), start, weights[start:stop], new[start:stop]):
                continue
            places = zip(split(weights[start:stop]), split(new[start:stop]), summed.tiles(start, stop), strict=True)
            for old, place, tile in places:
                torch.add(old, tile, alpha=factor, out=place)

    def _update_fused(self, current: _Runs, weights: Tensor, summed: Sum, kernel: Kernel, new: Tensor) -> None:
        """A step in one pass, or tile by tile: its gradient is summed, its weights are copied and updated."""
        covered = len(current.runs) == 1 and current.runs[0].stop - current.runs[0].start == self.chunk.elements
        if not covered:
            new.copy_(weights)
        for run in current.runs:
            first = not run.keys
            arrays = [self._begun(run, key, kernel.initial) for key in kernel.arrays]
            if kernel.counts:
                run.numbers.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1)
            count = run.numbers.get("step", self._nothing)
            after, before = new[run.start : run.stop], weights[run.start : run.stop]
            # Runs that end anywhere are left to torch, which does not treat the last few elements as the others.
            if kernel.formula is not None and not current.exact:
                formula = kernel.formula(count.item() if kernel.counts else 0.0, first)
                if summed.update(formula, run.start, before, after, arrays):
                    continue
            tiles = summed.tiles(run.start, run.stop)
            states = [split(array) for array in arrays]
            for place, old, tile, *state in zip(split(after), split(before), tiles, *states, strict=True):
                if covered:
                    place.copy_(old)
                kernel.apply(place, tile, state, count, first)

    def _begun(self, run: _Run, key: str, initial: float) -> Tensor:
        """A state array, as far as it belongs to a run; it begins as ``initial``."""
        if key not in self._arrays:
            self._arrays[key] = torch.zeros(self.chunk.elements, dtype=self._dtype)
        part = self._arrays[key][run.start : run.stop]
        if key not in run.keys:
            part.fill_(initial)
            run.keys |= {key}
        return part

    def _update(
        self,
        runs: Sequence[_Run],
        optimizer: torch.optim.Optimizer,
        weights: Tensor,
        summed: Sum,
        hypers: Hypers,
        new: Tensor,
    ) -> None:
        """A step of torch's optimizer, which sees each run as a parameter."""
        own = not summed.ready and not summed.kept
        gradient = summed.whole(scratch.flat(self._dtype, self.chunk.elements) if own else None)
        if self._rule.own and not own:  # it may write to gradients, which others read
            gradient = gradient.clone()
        new.copy_(weights)
        numbers = torch_hypers(self.optimizer, hypers)
        for group in optimizer.param_groups:
            group.update(numbers)
        for run in runs:
            run.param.data = new[run.start : run.stop]
            run.param.grad = gradient[run.start : run.stop]
        step(optimizer)
        for run in runs:
            run.param.grad = None
            run.param.data = self._nothing
            state: dict[str, Any] = optimizer.state.get(run.param, {})
            run.numbers = kept_numbers(self._rule, state)
            check_state(self._rule, {**state, **run.numbers}, (run.stop - run.start,))
            for key in state.keys() - run.numbers.keys():
                state[key] = self._keep(run, key, state[key])
                run.keys |= {key}

    def fresh(self) -> ChunkState:
        """The state of the same chunk before its first update."""
        return ChunkState(self.chunk, self.optimizer)

    def fork(self) -> ChunkState:
        """A copy, with memory of its own."""
        self._collect()
        copy = self.fresh()
        copy._arrays = {key: array.clone() for key, array in self._arrays.items()}
        copy._scalars = [{key: number.clone() for key, number in numbers.items()} for numbers in self._scalars]
        copy._keys, copy._structure = list(self._keys), self._structure
        return copy

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
        """Replaces the state by copies of entries of `export`, in any order; their parts of tensors may differ.

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

    def check(self, hypers: Hypers) -> None:
        """Raises ModelError if these hyper-parameters ask for other state than there is."""
        self._checked_structure(hypers)

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
        """Gathers the pieces in ``mask``, with neighbours of the same history in one run; sets an optimizer up."""
        pieces = self.chunk.pieces
        ends = [piece.chunk_start for piece in pieces[1:]] + [self.chunk.elements]
        histories = [self._history(index) if wanted else None for index, wanted in enumerate(mask)]
        fused = self.optimizer in FUSED
        runs: list[_Run] = []
        first = 0
        while first < len(pieces):
            last = first + 1
            if mask[first]:
                while not exact and last < len(pieces) and histories[last] == histories[first]:
                    last += 1
                start = pieces[first].chunk_start
                stop = start + pieces[first].elements if exact else ends[last - 1]
                tile = stop - start if fused else _UNFUSED_TILE
                for lo in range(start, stop, tile):
                    hi = min(lo + tile, stop)
                    numbers = {key: number.clone() for key, number in self._scalars[first].items()}
                    param = self._nothing if fused else weights[lo:hi].detach()
                    runs.append(_Run(lo, hi, first, last, numbers, self._keys[first], param))
            first = last
        if fused:
            return _Runs(mask, exact, tuple(runs), None)
        optimizer = build(self.optimizer, [[run.param for run in runs]], hypers)
        for run in runs:
            if not run.fresh:
                state = given_numbers(self._rule, run.numbers)
                state |= {key: self._arrays[key][run.start : run.stop] for key in run.keys}
                optimizer.state[run.param] = state
        return _Runs(mask, exact, tuple(runs), optimizer)

    def _history(self, index: int) -> tuple[object, ...]:
        """The properties that pieces must share to be updated as one parameter."""
        numbers = sorted((key, number.item()) for key, number in self._scalars[index].items())
        return (*numbers, *sorted(self._keys[index]))

    def _collect(self) -> None:
        """Takes the history back from the runs."""
        current, self._runs = self._runs, None
        for run in current.runs if current is not None else ():
            for index in range(run.first, run.last):
                self._scalars[index] = {key: value.clone() for key, value in run.numbers.items()}
                self._keys[index] = run.keys

    def _keep(self, run: _Run, key: str, value: Tensor) -> Tensor:
        """A state array of a run, now as a part of the chunk's."""
        if run.start == 0 and run.stop == self.chunk.elements:
            self._arrays[key] = value
            return value
        if key not in self._arrays:
            self._arrays[key] = torch.zeros(self.chunk.elements, dtype=self._dtype)
        place = self._arrays[key][run.start : run.stop]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
        return place


def _number(value: object) -> float:
    assert isinstance(value, float | int)
    return value


def _plain(hypers: Hypers) -> bool:
    """SGD without anything, which has no state."""
    return not any(hypers[key] for key in ("momentum", "weight_decay", "nesterov", "maximize"))
