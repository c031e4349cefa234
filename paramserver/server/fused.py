"""torch's fused optimizer kernels, called on parts of a parameter.

They update each element from itself alone. So a part at a time gives the same bits as all at once, if parts begin at
multiples of 64 bytes: then vector instructions cover the same elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paramserver.core.hypers import Hypers

# (weights, gradient, state arrays, steps so far with this one, whether the arrays have no history yet)
Apply = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, bool], None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step with certain hyper-parameters, in place.

    ``arrays``: the state that it reads and writes, in the order in which ``apply`` takes it; each begins as ``initial``
    everywhere. ``counts``: it needs the number of steps.
    """

    arrays: tuple[str, ...]
    counts: bool
    initial: float
    apply: Apply


def kernel_of(name: str, hypers: Hypers) -> Kernel:
    """The kernel of an optimizer in `tensors.optimizers.FUSED`, with valid hyper-parameters."""
    return _MAKERS[name](dict(hypers))


def _sgd(numbers: dict[str, Any]) -> Kernel:
    def apply(weights: Tensor, gradient: Tensor, arrays: Sequence[Tensor], step: Tensor, first: bool) -> None:
        torch._fused_sgd_([weights], [gradient], list(arrays), is_first_step=first and bool(arrays), **numbers)

    return Kernel(("momentum_buffer",) if numbers["momentum"] else (), False, 0.0, apply)


def _adam(numbers: dict[str, Any]) -> Kernel:
    kernel = torch._fused_adamw_ if numbers.pop("decoupled_weight_decay", False) else torch._fused_adam_
    numbers["beta1"], numbers["beta2"] = numbers.pop("betas")

    def apply(weights: Tensor, gradient: Tensor, arrays: Sequence[Tensor], step: Tensor, first: bool) -> None:
        kernel([weights], [gradient], [arrays[0]], [arrays[1]], list(arrays[2:]), [step], **numbers)

    largest = ("max_exp_avg_sq",) if numbers["amsgrad"] else ()
    return Kernel(("exp_avg", "exp_avg_sq", *largest), True, 0.0, apply)


def _adamw(numbers: dict[str, Any]) -> Kernel:
    return _adam({**numbers, "decoupled_weight_decay": True})


def _adagrad(numbers: dict[str, Any]) -> Kernel:
    initial = numbers.pop("initial_accumulator_value")

    def apply(weights: Tensor, gradient: Tensor, arrays: Sequence[Tensor], step: Tensor, first: bool) -> None:
        torch._fused_adagrad_([weights], [gradient], [arrays[0]], [step], **numbers)

    return Kernel(("sum",), True, initial, apply)


_MAKERS: dict[str, Callable[[dict[str, Any]], Kernel]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
}
