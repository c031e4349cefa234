"""The allow-listed optimizers as torch classes: the name of a user's optimizer, and how a server builds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paramserver.core.layout.hypers import (
    RULES,
    SUPPORTED,
    Field,
    Form,
    Hypers,
    HyperValue,
    Rule,
    Shape,
    rule_of,
    validate,
)
from paramserver.errors import ModelError
from paramserver.tensors.own import describe_own, own_class, whole_again
from paramserver.tensors.private import FUSED

# Why an optimizer of torch cannot be run by servers.
_WHY_NOT = {
    "LBFGS": "it calls its closure several times in a step, and no worker can compute for the servers within an update",
    "SparseAdam": "it takes sparse gradients only, and servers have none: use Adam",
}


def torch_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of an allow-listed optimizer other than "sum".

    Raises ModelError if this torch does not have it, or if it is not torch's and this process does not run it.
    """
    if rule_of(name).own:
        return own_class(rule_of(name).own)
    found = getattr(torch.optim, RULES[name].title, None)
    if found is None:
        raise ModelError(f"torch {torch.__version__} has no {RULES[name].title}: install a later version")
    assert issubclass(found, torch.optim.Optimizer)
    return found  # type: ignore[no-any-return]


def describe(
    optimizer: torch.optim.Optimizer, param_groups: Sequence[Mapping[str, Any]] | None = None
) -> tuple[str, list[dict[str, HyperValue]]]:
    """The name and the hyper-parameters of each parameter group of a user's optimizer.

    ``param_groups``: in place of the optimizer's.

    Flags on how torch executes it (foreach, fused, capturable) and entries of learning-rate schedulers are left out.
    Raises ModelError if its class is not exactly an allow-listed one, or for numbers that servers do not take.
    """
    kind, given = type(optimizer), optimizer.param_groups if param_groups is None else param_groups
    name = next((n for n, rule in RULES.items() if rule.title and kind is getattr(torch.optim, rule.title, None)), "")
    if not name and "__paramserver__" in vars(kind):
        return describe_own(optimizer, given)
    if not name:
        if kind is getattr(torch.optim, kind.__name__, None) and kind.__name__ in _WHY_NOT:
            raise ModelError(f"{kind.__name__} is not supported: {_WHY_NOT[kind.__name__]}")
        raise ModelError(
            f"{kind.__module__}.{kind.__qualname__} is not supported; supported: {SUPPORTED}, and classes that "
            "are declared with paramserver.server_optimizer"
        )
    rule = RULES[name]
    groups: list[dict[str, HyperValue]] = []
    for index, group in enumerate(given):
        if group.get("differentiable"):
            raise ModelError(f"parameter group {index} has differentiable=True, which servers cannot do; leave it out")
        groups.append(
            {key: _value(field, group[key]) for key, field in rule.fields.items() if key in group},
        )
        if name == "adam":  # torch before 2.7 has no such choice
            groups[-1].setdefault("decoupled_weight_decay", False)
    validate(name, groups)
    return name, groups


def _value(field: Field, value: Any) -> HyperValue:
    """A hyper-parameter as a plain value, where torch allows tensors of one element and several types of numbers."""
    if field.form is Form.FLAG:
        return bool(value)
    if field.form is Form.CHOICE:
        if value not in field.choices:
            raise ModelError(f"{value!r} is none of {', '.join(map(repr, field.choices))}")
        return float(field.choices.index(value))
    if field.form in (Form.PAIR, Form.TRIPLE, Form.LATE_PAIR):
        return tuple(float(number) for number in value if number is not None)
    return float(value)


def torch_hypers(name: str, hypers: Hypers) -> dict[str, Any]:
    """Valid hyper-parameters as torch's optimizer has them in a parameter group.

    >>> torch_hypers("adafactor", {"eps": (0.001,)})
    {'eps': (None, 0.001)}
    """
    rule = rule_of(name)
    if rule.own:
        return {key: whole_again(value) for key, value in hypers.items()}
    return {key: _torch_value(rule.fields[key], value) for key, value in hypers.items()}


def _torch_value(field: Field, value: HyperValue) -> Any:
    if field.form is Form.LATE_PAIR:
        assert isinstance(value, tuple)
        return value if len(value) == 2 else (None, *value)
    if field.form is Form.CHOICE:
        assert isinstance(value, float | int)
        return field.choices[int(value)]
    if field.form is Form.WHOLE:
        assert isinstance(value, float | int)
        return int(value)
    return value


def arguments(name: str, hypers: Hypers) -> dict[str, Any]:
    """Valid hyper-parameters as arguments of the optimizer's class."""
    given = torch_hypers(name, hypers)
    if name == "adam" and not given["decoupled_weight_decay"]:
        del given["decoupled_weight_decay"]  # torch before 2.7 has no such choice
    return given


def build(name: str, groups: Sequence[Sequence[torch.Tensor]], hypers: Hypers) -> torch.optim.Optimizer:
    """A torch optimizer with one parameter group per non-empty entry of ``groups``, all with the same valid ``hypers``.

    It takes the fused kernel where torch has one for CPU tensors, and otherwise goes tensor by tensor.
    """
    given = arguments(name, hypers)
    if name in FUSED:
        given["fused"] = True
    elif name != "muon" and not rule_of(name).own:  # they have no other way
        given["foreach"] = False
    make: Any = torch_class(name)
    made: torch.optim.Optimizer = make([{"params": list(group)} for group in groups if group], **given)
    return made


def given_numbers(rule: Rule, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state that is one number for a whole tensor, as the optimizer's class has it."""
    return {key: int(value) if key in rule.counts else value for key, value in state.items() if key in rule.scalars}


def kept_numbers(rule: Rule, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same as servers keep it: tensors."""
    return {
        key: torch.tensor(float(value)) if key in rule.counts else value
        for key, value in state.items()
        if key in rule.scalars
    }


def check_state(rule: Rule, state: Mapping[str, torch.Tensor], shape: Shape) -> None:
    """Raises ModelError, naming the state, if a class that is not torch's has other state than it has declared."""
    if not rule.own:
        return
    declared = rule.arrays | rule.scalars
    if state.keys() != declared:
        raise ModelError(f"{rule.own} keeps the state {sorted(state)} and declares {sorted(declared)}")
    for key, value in state.items():
        wanted = shape if key in rule.arrays else ()
        if not isinstance(value, torch.Tensor) or (tuple(value.shape) != wanted and value.numel() != 1):
            raise ModelError(f"{rule.own} keeps a state {key!r} that is no tensor of shape {wanted}")
