"""Tells the gradients of the present slice from those that the script has left over from earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


class Leftover:
    """Gradients that were there when a slice began: many scripts clear them only before the next backward pass."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        # By index: the gradient, which the script may free, and how often it had been written to.
        self._former: dict[int, tuple[TensorWeakRef, int]] = {}

    def begin(self) -> None:
        """A slice begins."""
        self._former = {
            index: (TensorWeakRef(parameter.grad), parameter.grad._version)
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }

    def has_new(self, indices: Iterable[int]) -> bool:
        """Whether one of these parameters, by index, has a gradient of the present slice that is not zero."""
        return any(self._is_new(index, self._parameters[index].grad) for index in indices)

    def _is_new(self, index: int, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return False
        if index in self._former:
            former, writes = self._former[index]
            if former() is gradient and writes == gradient._version:
                return False
        return bool(torch.count_nonzero(gradient))
