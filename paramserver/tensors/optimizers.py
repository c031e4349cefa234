"""The allow-listed optimizers as torch classes: the name of a user's optimizer, and how a server builds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paramserver.core.layout.hypers import RULES, SUPPORTED, Form, Hypers, HyperValue, validate
from paramserver.errors import ModelError

# Those with a fused kernel for CPU tensors of float32 and float64.
FUSED = frozenset({"sgd", "adam", "adamw", "adagrad"})


def torch_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of an allow-listed optimizer other than "sum"."""
    found = getattr(torch.optim, RULES[name].title)
    assert issubclass(found, torch.optim.Optimizer)
    return found  # type: ignore[no-any-return]


def describe(optimizer: torch.optim.Optimizer) -> tuple[str, list[dict[str, HyperValue]]]:
    """The name and the hyper-parameters of each parameter group of a user's optimizer.

    Flags on how torch executes it (foreach, fused, capturable) and entries of learning-rate schedulers are left out.
    Raises ModelError if its class is not exactly an allow-listed one, or for numbers that servers do not take.
    """
    for name, rule in RULES.items():
        if rule.title and type(optimizer) is torch_class(name):
            break
    else:
        kind = type(optimizer)
        raise ModelError(f"{kind.__module__}.{kind.__qualname__} is not supported; supported: {SUPPORTED}")
    groups: list[dict[str, HyperValue]] = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ModelError(f"parameter group {index} has differentiable=True, which servers cannot do; leave it out")
        groups.append(
            {key: _value(field.form, group[key]) for key, field in rule.fields.items() if key in group},
        )
        if name == "adam":  # torch before 2.7 has no such choice
            groups[-1].setdefault("decoupled_weight_decay", False)
    validate(name, groups)
    return name, groups


def _value(form: Form, value: Any) -> HyperValue:
    """A hyper-parameter as a plain value, where torch allows tensors of one element and several types of numbers."""
    if form is Form.FLAG:
        return bool(value)
    if form is Form.PAIR:
        return tuple(float(number) for number in value)
    return float(value)


def build(name: str, groups: Sequence[Sequence[torch.Tensor]], hypers: Hypers) -> torch.optim.Optimizer:
    """A torch optimizer with one parameter group per non-empty entry of ``groups``, all with the same valid ``hypers``.

    It takes the fused kernel where torch has one for CPU tensors, and otherwise goes tensor by tensor.
    """
    given: dict[str, Any] = dict(hypers)
    if name == "adam" and not given["decoupled_weight_decay"]:
        del given["decoupled_weight_decay"]  # torch before 2.7 has no such choice
    given |= {"fused": True} if name in FUSED else {"foreach": False}
    make: Any = torch_class(name)
    made: torch.optim.Optimizer = make([{"params": list(group)} for group in groups if group], **given)
    return made
