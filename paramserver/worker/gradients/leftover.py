"""Tells the gradients of the present slice from those that are left of earlier ones.

A contribution must follow from the weights, from its slice and from the history of the job. What lies in ``.grad`` when
a slice begins is the past of this process: another worker, which computes the slice when this one is gone, has another
past. So a gradient counts if this slice has made it, and a tensor of zeros that the script keeps counts if one process
of torch would have it, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

# A gradient, which the script may free, and how often it had been written to.
_Mark = tuple[TensorWeakRef, int]
# Stands for a gradient that the script has written to: it is not what an earlier slice has left.
_WRITTEN = -1


class Leftover:
    """Of these parameters, by index. Hooks of autograd are set only where a gradient is left when a slice begins."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        # When the slice began; and when the script stepped last.
        self._at_begin: dict[int, _Mark] = {}
        self._stepped: dict[int, _Mark] = {}
        # Of those in `_at_begin`: how often it was written to if the script has not cleared it; those to which this
        # slice has added a gradient; of them, those that were not cleared before.
        self._expected: dict[int, int] = {}
        self._made: set[int] = set()
        self._stale: set[int] = set()
        # The nodes of autograd that add gradients up, which live as long as somebody holds them.
        self._nodes: dict[int, Any] = {}
        # Whether the script keeps a gradient's tensor when it clears the gradient, as far as it has shown that.
        self._kept: dict[int, bool] = {}
        # Gradients that were there when the first slice began, so each process that runs the script has them.
        self._own: frozenset[int] = frozenset()
        self._has_stepped = False

    # ---- the slice

    def begin(self, only: Collection[int] | None = None) -> None:
        """A slice begins. ``only``: of these parameters, by index; None: of all."""
        written: list[int] = []
        for index in range(len(self._parameters)) if only is None else only:
            self._made.discard(index)
            self._stale.discard(index)
            self._at_begin.pop(index, None)
            gradient, former = self._parameters[index].grad, self._stepped.get(index)
            same = former is not None and gradient is not None and former[0]() is gradient
            if former is not None and not same:
                self._kept[index] = False
            if gradient is None:
                continue
            reference = former[0] if former is not None and same else TensorWeakRef(gradient)
            self._at_begin[index] = reference, gradient._version
            if former is None or self._at_begin[index] != former:
                written.append(index)
            self._expected[index] = gradient._version
            self._listen(index)
        for index, zeros in zip(written, _are_zeros([self._grad(index) for index in written]), strict=True):
            if zeros:
                self._expected[index] = _WRITTEN
        if not self._has_stepped:
            self._own = frozenset(self._at_begin)

    def _listen(self, index: int) -> None:
        """Hear of each gradient that autograd is about to add up here."""
        parameter = self._parameters[index]
        if index in self._nodes or not parameter.requires_grad:
            return
        node = self._nodes[index] = get_gradient_edge(parameter).node
        node.register_prehook(lambda _, index=index: self._adds(index))

    def _adds(self, index: int) -> None:
        self._made.add(index)
        if index not in self._at_begin:
            return
        gradient, version = self._parameters[index].grad, self._expected[index]
        if gradient is None or not self._is_left(index, gradient, version) or not _nonzero(gradient):
            self._expected[index] = _WRITTEN
            self._stale.discard(index)
        else:
            self._expected[index] = version + 1
            self._stale.add(index)

    def _is_left(self, index: int, gradient: torch.Tensor, version: int) -> bool:
        """Whether this is the tensor that was there when the slice began, written to so often."""
        return self._at_begin[index][0]() is gradient and gradient._version == version

    def _grad(self, index: int) -> torch.Tensor:
        gradient = self._parameters[index].grad
        assert gradient is not None
        return gradient

    def has_new(self, indices: Iterable[int]) -> bool:
        """Whether one of these parameters, by index, has a gradient of the present slice that is not zero."""
        return any(self._is_new(index, self._parameters[index].grad) for index in indices)

    def _is_new(self, index: int, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return False
        if index in self._at_begin and self._is_left(index, gradient, self._at_begin[index][1]):
            return False
        return _nonzero(gradient)

    # ---- the step

    def steps(self, indices: Iterable[int]) -> int | None:
        """The script steps on these parameters; the first one whose gradient holds what an earlier slice has left."""
        self._has_stepped, found = True, None
        for index in indices:
            gradient = self._parameters[index].grad
            began = self._at_begin.get(index)
            same = began is not None and gradient is not None and began[0]() is gradient
            if began is not None:
                self._kept[index] = same
            if gradient is None:
                self._stepped.pop(index, None)
                continue
            reference = began[0] if began is not None and same else TensorWeakRef(gradient)
            self._stepped[index] = reference, gradient._version
            left = index not in self._made and same and gradient._version == self._expected[index]
            if found is None and (index in self._stale or left) and _nonzero(gradient):
                found = index
        return found

    def counts(self, index: int, ever_used: Collection[int]) -> bool:
        """Whether a gradient that is there is one of this slice, or of zeros that one process of torch has, too.

        ``ever_used``: the parameters that contributions to earlier versions had gradients for.
        """
        if index not in self._at_begin or index in self._made or index in ever_used:
            return True
        reference, version = self._at_begin[index]
        gradient = self._grad(index)
        if reference() is not gradient or index in self._own:
            return True
        return version != gradient._version and _nonzero(gradient)  # the script has written its own gradient there

    def keeps(self, index: int) -> bool | None:
        """Whether the script keeps the tensor of a gradient that it clears. None: it has cleared none so far.

        Raises ValueError if it keeps some, and has not shown what it does with this one.
        """
        ways = {self._kept[index]} if index in self._kept else set(self._kept.values())
        if len(ways) > 1:
            raise ValueError("some gradients are kept and others are not")
        return next(iter(ways), None)


def _nonzero(gradient: torch.Tensor) -> bool:
    return gradient.is_sparse or bool(torch.count_nonzero(gradient))


def _are_zeros(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """Which of these hold zeros only. A device is asked once."""
    if all(gradient.device.type == "cpu" or gradient.is_sparse or not gradient.numel() for gradient in gradients):
        return [not _nonzero(gradient) for gradient in gradients]
    norms = torch._foreach_norm([gradient.reshape(-1) for gradient in gradients], math.inf, dtype=torch.float64)
    return [bool(zero) for zero in (torch.stack(norms) == 0).tolist()]
