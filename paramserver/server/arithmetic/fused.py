"""torch's fused optimizer kernels, called on parts of a parameter, and the formulas of our own that do the same.

They update each element from itself alone. So a part at a time gives the same bits as all at once, if parts begin at
multiples of 64 bytes: then vector instructions cover the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paramserver.core.layout.hypers import Hypers
from paramserver.kernels.library import Formula
from paramserver.kernels.library import Kind as Step
from paramserver.tensors.private import fused

# (weights, gradient, state arrays, steps so far with this one, whether the arrays have no history yet)
Apply = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, bool], None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step with certain hyper-parameters, in place.

    ``arrays``: the state that it reads and writes, in the order in which ``apply`` takes it; each begins as ``initial``
    everywhere. ``counts``: it needs the number of steps. ``formula``: the same by the compiled kernels, if they can do
    it; of the number of steps (0 if it is not needed) and whether the arrays have no history yet.
    """

    arrays: tuple[str, ...]
    counts: bool
    initial: float
    apply: Apply
    formula: Callable[[float, bool], Formula] | None = None


def kernel_of(name: str, hypers: Hypers) -> Kernel:
    """The kernel of an optimizer in `tensors.private.FUSED`, with valid hyper-parameters."""
    return _MAKERS[name](dict(hypers))


def _sgd(numbers: dict[str, Any]) -> Kernel:
    def apply(weights: Tensor, gradient: Tensor, arrays: Sequence[Tensor], step: Tensor, first: bool) -> None:
        fused["_fused_sgd_"]([weights], [gradient], list(arrays), is_first_step=first and bool(arrays), **numbers)

    def formula(steps: float, first: bool) -> Formula:
        lr, momentum = -numbers["lr"], numbers["momentum"]
        which = (lr, numbers["weight_decay"], momentum, 1.0 - numbers["dampening"], float(numbers["nesterov"]))
        return Formula(Step.SGD, which, numbers["maximize"], first)

    return Kernel(("momentum_buffer",) if numbers["momentum"] else (), False, 0.0, apply, formula)


def _adam(numbers: dict[str, Any]) -> Kernel:
    decoupled = numbers.pop("decoupled_weight_decay", False)
    kernel = fused["_fused_adamw_" if decoupled else "_fused_adam_"]
    numbers["beta1"], numbers["beta2"] = numbers.pop("betas")

    def apply(weights: Tensor, gradient: Tensor, arrays: Sequence[Tensor], step: Tensor, first: bool) -> None:
        kernel([weights], [gradient], [arrays[0]], [arrays[1]], list(arrays[2:]), [step], **numbers)

    def formula(steps: float, first: bool) -> Formula:
        lr, decay, one, two = numbers["lr"], numbers["weight_decay"], numbers["beta1"], numbers["beta2"]
        decays = (1.0 - lr * decay, 0.0) if decoupled else (1.0, decay)
        corrections = math.sqrt(1.0 - two**steps), numbers["eps"], -(lr / (1.0 - one**steps))
        return Formula(Step.ADAM, (*decays, 1.0 - one, two, 1.0 - two, *corrections), numbers["maximize"], first)

    if numbers["amsgrad"]:
        return Kernel(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), True, 0.0, apply)
    return Kernel(("exp_avg", "exp_avg_sq"), True, 0.0, apply, formula)


def _adagrad(numbers: dict[str, Any]) -> Kernel:
    initial = numbers.pop("initial_accumulator_value")

    def apply(weights: Tensor, gradient: Tensor, arrays: Sequence[Tensor], step: Tensor, first: bool) -> None:
        fused["_fused_adagrad_"]([weights], [gradient], [arrays[0]], [step], **numbers)

    return Kernel(("sum",), True, initial, apply)


_MAKERS: dict[str, Callable[[dict[str, Any]], Kernel]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": lambda numbers: _adam({**numbers, "decoupled_weight_decay": True}),
    "adagrad": _adagrad,
}
