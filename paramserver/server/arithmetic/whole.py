"""Updates that need all elements of a tensor, by torch's own optimizers: each tensor is a parameter of its shape.

The state is kept as torch has it, by tensor. Its arrays may have other shapes than their tensor, such as a number per
row. The arithmetic of a process has one thread per update, so that norms and products are summed in the same order
wherever a tensor lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from paramserver.core.layout.hypers import Hypers, Shape, rule_of
from paramserver.core.layout.plan import Chunk, Kind, Layout
from paramserver.errors import ModelError
from paramserver.server.arithmetic.apply import ChunkState
from paramserver.server.arithmetic.combine import Sum
from paramserver.server.arithmetic.state import State, StateEntry
from paramserver.tensors.dtypes import torch_dtype
from paramserver.tensors.optimizers import build, check_state, given_numbers, kept_numbers, torch_hypers
from paramserver.tensors.uncompiled import step


class WholeState:
    """The optimizer state of the tensors in a chunk, none of which is cut. ``shapes``: of these tensors, by index."""

    def __init__(self, chunk: Chunk, optimizer: str, shapes: Mapping[int, Shape]) -> None:
        assert chunk.kind is Kind.PARAMETER, chunk.kind
        self.chunk, self.optimizer, self._shapes = chunk, optimizer, shapes
        self._rule = rule_of(optimizer)
        self._dtype = torch_dtype(chunk.dtype)
        # By tensor, then by key; only of tensors that were used.
        self._states: dict[int, dict[str, Tensor]] = {}
        self._torch: torch.optim.Optimizer | None = None
        self._nothing = torch.empty(0, dtype=self._dtype)

    def step(
        self, weights: Tensor, gradient: Tensor | Sum, used: Collection[int], hypers: Hypers, out: Tensor | None = None
    ) -> Tensor:
        """The next weights of the chunk, in new memory (or in ``out``); updates the state. As `ChunkState.step`."""
        here = [piece for piece in self.chunk.pieces if piece.tensor in used]
        if not here:
            return weights
        flat = (gradient if isinstance(gradient, Sum) else Sum.of(gradient)).whole()
        flat = flat.clone() if self._rule.own else flat  # it may write to gradients, which others read
        new = torch.empty_like(weights) if out is None else out
        new.copy_(weights)
        optimizer = self._optimizer(hypers)
        (group,) = optimizer.param_groups
        group.update(torch_hypers(self.optimizer, hypers))
        params = dict(zip((piece.tensor for piece in self.chunk.pieces), group["params"], strict=True))
        for piece in here:
            param, span = params[piece.tensor], slice(piece.chunk_start, piece.chunk_start + piece.elements)
            shape = self._shapes[piece.tensor]
            param.data, param.grad = new[span].view(shape), flat[span].view(shape)
            state = self._states.get(piece.tensor, {})
            optimizer.state[param] = {**state, **given_numbers(self._rule, state)}
        try:
            step(optimizer)
        finally:
            for piece in here:
                param = params[piece.tensor]
                param.grad, param.data = None, self._nothing
        for piece in here:
            after: dict[str, Any] = optimizer.state.pop(params[piece.tensor], {})
            self._states[piece.tensor] = {**after, **kept_numbers(self._rule, after)}
            check_state(self._rule, self._states[piece.tensor], self._shapes[piece.tensor])
        return new

    def _optimizer(self, hypers: Hypers) -> torch.optim.Optimizer:
        """torch's optimizer, with a parameter for each tensor; it keeps no state between two steps."""
        if self._torch is None:
            shapes = [self._shapes[piece.tensor] for piece in self.chunk.pieces]
            self._torch = build(self.optimizer, [[torch.empty(shape, dtype=self._dtype) for shape in shapes]], hypers)
            self._torch.state.clear()
            for param in self._torch.param_groups[0]["params"]:
                param.data = self._nothing
        return self._torch

    def fresh(self) -> WholeState:
        """The state of the same chunk before its first update."""
        return WholeState(self.chunk, self.optimizer, self._shapes)

    def fork(self) -> WholeState:
        """A copy, with memory of its own."""
        copy = self.fresh()
        copy._states = {
            tensor: {key: value.clone() for key, value in states.items()} for tensor, states in self._states.items()
        }
        return copy

    def export(self) -> Iterator[StateEntry]:
        """The state by tensor and key, in this order: arrays are whole, and flat. The data are views of the state."""
        for piece in self.chunk.pieces:
            for key, value in sorted(self._states.get(piece.tensor, {}).items()):
                yield piece.tensor, key, 0, value.reshape(-1), key in self._rule.scalars

    def load(self, entries: Iterable[StateEntry]) -> None:
        """Replaces the state by copies of entries of `export`, whole or in parts, in any order.

        Entries of other tensors are left out. Raises ModelError, and changes nothing, if the entries are not the
        complete state of this optimizer for every tensor that has any.
        """
        loaded: dict[int, dict[str, Tensor]] = {}
        filled: dict[tuple[int, str], int] = {}
        here = {piece.tensor for piece in self.chunk.pieces}
        for tensor, key, start, data, scalar in entries:
            if tensor not in here:
                continue
            shape = self._shape(tensor, key, scalar)
            states = loaded.setdefault(tensor, {})
            if key not in states:
                states[key] = torch.zeros(shape, dtype=data.dtype if scalar else self._dtype)
            if start + data.numel() > states[key].numel():
                raise ModelError(
                    f"optimizer state {key} of tensor {tensor} is longer than it can be; load what it saved"
                )
            states[key].view(-1)[start : start + data.numel()] = data.reshape(-1)
            filled[tensor, key] = filled.get((tensor, key), 0) + data.numel()
        for tensor in loaded:
            for key in sorted(self._rule.scalars | self._rule.arrays):
                full = () if key in self._rule.scalars else self._rule.array_shape(key, self._shapes[tensor])
                if full is not None and filled.get((tensor, key)) != prod(full):
                    raise ModelError(f"optimizer state {key} of tensor {tensor} is incomplete; load all of it")
        self._states = loaded

    def _shape(self, tensor: int, key: str, scalar: bool) -> Shape:
        """The shape of a state. Raises ModelError if the tensor has no such state."""
        shape: Shape | None = () if scalar else self._rule.array_shape(key, self._shapes[tensor])
        if shape is None or key not in (self._rule.scalars if scalar else self._rule.arrays):
            raise ModelError(f"optimizer {self.optimizer} has no state {key[:40]!r}; load what it saved")
        return shape

    def check(self, hypers: Hypers) -> None:
        """Nothing depends on hyper-parameters: there is no optimizer of whole tensors with structural ones."""
        assert not self._rule.structural, self.optimizer


def state_of(chunk: Chunk, optimizer: str, layout: Layout) -> State:
    """The state of a chunk, or of the joined chunks of a tensor, before its first update.

    Raises ModelError if the optimizer is not allow-listed.
    """
    if rule_of(optimizer).whole:
        shapes = {piece.tensor: layout.tensors[piece.tensor].shape for piece in chunk.pieces}
        return WholeState(chunk, optimizer, shapes)
    return ChunkState(chunk, optimizer)
