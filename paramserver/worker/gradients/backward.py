"""Takes gradients up as autograd makes them, for a contribution that leaves during the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from paramserver.tensors.private import largest_of_all, subtract_all
from paramserver.worker.flat import PartialSum, put, put_all

if TYPE_CHECKING:
    from torch import nn

    from paramserver.worker.gradients.leaving import Leaving

# So many elements are compared at a time, so that they stay in cache.
_TILE = 262_144


class Backward:
    """Watches trained parameters, by their index. Their gradients must be dense."""

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        self._parameters = parameters
        self._partial: PartialSum | None = None
        self._leaving: Leaving | None = None
        self._again = False
        # The present backward pass is not the last one: see `Context.no_sync`.
        self._held_back = False
        # Parameters that are frozen cannot be watched.
        self._unwatched = dict(parameters)
        self._watch()

    def begin(self, partial: PartialSum, leaving: Leaving) -> None:
        """From now on gradients go into ``partial``, and ``leaving`` hears of each gradient."""
        self._watch()  # some may have thawed
        self._partial, self._leaving, self._again = partial, leaving, False

    def _watch(self) -> None:
        for index, parameter in list(self._unwatched.items()):
            if parameter.requires_grad:
                del self._unwatched[index]
                made = partial(self._made, index)
                parameter.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Context of a backward pass that another one follows: its gradients are not taken up."""
        former, self._held_back = self._held_back, True
        try:
            yield
        finally:
            self._held_back = former

    def end(self) -> bool:
        """The script has finished its gradients. True if they are, bit for bit, those that were taken up."""
        partial, self._partial = self._partial, None
        self._leaving = None
        if partial is None or self._again:
            return False
        gradients = {index: parameter.grad for index, parameter in self._parameters.items()}
        if any((gradient is None) == (index in partial.used) for index, gradient in gradients.items()):
            return False
        pairs = [(partial.space.view(i), gradient) for i, gradient in gradients.items() if gradient is not None]
        with torch.no_grad():
            if partial.space.device.type == "cpu":
                return all(_same(place, gradient, partial.samples) for place, gradient in pairs)
            return _all_same(pairs, partial.samples)

    def _made(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has finished a gradient."""
        partial, leaving, gradient = self._partial, self._leaving, parameter.grad
        if partial is None or leaving is None or gradient is None or self._held_back:
            return
        # Unexpected, or of a second backward pass: what lies beside it, or the first gradient, may have left.
        if gradient.is_sparse or index in partial.used or index not in leaving.facts.used:
            self._again = True
            return
        with torch.no_grad():
            put(partial.space.view(index), gradient, partial.samples)
        partial.used.add(index)
        leaving.ready(index)


def _same(place: torch.Tensor, gradient: torch.Tensor, samples: int) -> bool:
    """Whether `put` would change nothing; a NaN is never the same."""
    if gradient.dtype != place.dtype or not gradient.is_contiguous():
        again = torch.empty_like(place)
        put(again, gradient, samples)
        return torch.equal(again, place)
    tiles = zip(torch.split(place.reshape(-1), _TILE), torch.split(gradient.reshape(-1), _TILE), strict=True)
    return all(torch.equal(mine, torch.mul(theirs, samples)) for mine, theirs in tiles)


def _all_same(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], samples: int) -> bool:
    """The same for many on a device, which is asked once. An infinity is never the same, either."""
    pairs = [(place, gradient) for place, gradient in pairs if place.numel()]
    if not pairs:
        return True
    again = [torch.empty_like(place) for place, _ in pairs]
    put_all(again, [gradient for _, gradient in pairs], samples)
    subtract_all(again, [place for place, _ in pairs])
    return not bool(largest_of_all(again, torch.float64).any())
