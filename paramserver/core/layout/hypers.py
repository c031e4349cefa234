"""The optimizers that servers run, and the numbers each of them takes. Tables and checks only, no code of theirs.

Names and numbers arrive from other machines, so everything not listed here is refused.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from paramserver.errors import ModelError

HyperValue = float | bool | tuple[float, ...]
Hypers = Mapping[str, HyperValue]

# Beyond this a hyper-parameter is a mistake, and zeros may no longer stay zeros in float32.
LARGEST = 1e30


class Form(enum.Enum):
    NUMBER = "a number"
    FLAG = "true or false"
    PAIR = "a pair of numbers"


@dataclass(frozen=True, slots=True)
class Field:
    """One hyper-parameter; every number in it lies in ``[low, high]``, without ``high`` itself if it is ``open``."""

    form: Form = Form.NUMBER
    low: float = 0.0
    high: float = LARGEST
    open: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer: its class in torch.optim (empty: our own), all its hyper-parameters, and the shape of its state.

    ``arrays``: state with a number per element. ``scalars``: state that is one number for the whole tensor.
    ``structural``: hyper-parameters that decide which arrays exist, with the array each needs; they cannot be switched
    on or off once training has begun.
    """

    title: str
    fields: Mapping[str, Field]
    arrays: frozenset[str]
    scalars: frozenset[str]
    structural: Mapping[str, str]


_NUMBER = Field()
_ANY = Field(low=-LARGEST)
_FLAG = Field(Form.FLAG)
_BETAS = Field(Form.PAIR, high=1.0, open=True)
# The running product of NAdam's betas is kept in float32 and must stay below one.
_NADAM_BETAS = Field(Form.PAIR, high=1.0 - 1e-6)
_COMMON = {"lr": _NUMBER, "weight_decay": _NUMBER, "maximize": _FLAG}
_ADAM = {"betas": _BETAS, "eps": _NUMBER, "amsgrad": _FLAG}
_DECOUPLED = {"decoupled_weight_decay": _FLAG}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _rule(
    title: str,
    fields: Mapping[str, Field],
    arrays: tuple[str, ...],
    scalars: tuple[str, ...] = ("step",),
    structural: Mapping[str, str] = MappingProxyType({}),
) -> Rule:
    every = dict(sorted({**_COMMON, **fields}.items()))
    return Rule(title, every, frozenset(arrays), frozenset(scalars), structural)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "sgd": _rule("SGD", {"momentum": _NUMBER, "dampening": _ANY, "nesterov": _FLAG}, ("momentum_buffer",), ()),
        "adam": _rule(
            "Adam", {**_ADAM, **_DECOUPLED}, (*_MOMENTS, "max_exp_avg_sq"), structural={"amsgrad": "max_exp_avg_sq"}
        ),
        "adamw": _rule("AdamW", _ADAM, (*_MOMENTS, "max_exp_avg_sq"), structural={"amsgrad": "max_exp_avg_sq"}),
        "adagrad": _rule(
            "Adagrad", {"lr_decay": _NUMBER, "initial_accumulator_value": _NUMBER, "eps": _NUMBER}, ("sum",)
        ),
        "rmsprop": _rule(
            "RMSprop",
            {"alpha": _NUMBER, "eps": _NUMBER, "momentum": _NUMBER, "centered": _FLAG},
            ("square_avg", "grad_avg", "momentum_buffer"),
            structural={"centered": "grad_avg", "momentum": "momentum_buffer"},
        ),
        "nadam": _rule(
            "NAdam",
            {"betas": _NADAM_BETAS, "eps": _NUMBER, "momentum_decay": _NUMBER, **_DECOUPLED},
            _MOMENTS,
            ("step", "mu_product"),
        ),
        "radam": _rule("RAdam", {"betas": _BETAS, "eps": _NUMBER, **_DECOUPLED}, _MOMENTS),
        "adamax": _rule("Adamax", {"betas": _BETAS, "eps": _NUMBER}, ("exp_avg", "exp_inf")),
        "adadelta": _rule("Adadelta", {"rho": Field(high=1.0), "eps": _NUMBER}, ("square_avg", "acc_delta")),
        # new = old + the sum of what was pushed
        "sum": Rule("", {}, frozenset(), frozenset(), {}),
    }
)

SUPPORTED = ", ".join(rule.title for rule in RULES.values() if rule.title)


def validate(name: str, groups: Sequence[Mapping[str, object]]) -> None:
    """Raises ModelError, naming group and field, unless servers can run this optimizer with these numbers."""
    rule = RULES.get(name)
    if rule is None:
        raise ModelError(f"optimizer {_show(name)} is not supported; use one of {', '.join(RULES)}")
    if not groups:
        raise ModelError(f"optimizer {name} has no parameter group; give at least one")
    for index, hypers in enumerate(groups):
        problem = _find_in_group(rule, hypers)
        if problem is not None:
            raise ModelError(f"optimizer {name}, parameter group {index}: {problem}")


def validate_change(name: str, before: Sequence[Hypers], after: Sequence[Hypers]) -> None:
    """Raises ModelError unless training may go on with the numbers ``after`` where it had the valid ``before``."""
    validate(name, after)
    if len(before) != len(after):
        raise ModelError(f"optimizer {name} had {len(before)} parameter groups and now has {len(after)}; keep them all")
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        for key in RULES[name].structural:
            if bool(one[key]) != bool(other[key]):
                raise ModelError(
                    f"optimizer {name}, parameter group {index}: {key} cannot change from {one[key]} to {other[key]}"
                    " during training; begin a new job for that"
                )


def _find_in_group(rule: Rule, hypers: Mapping[str, object]) -> str | None:
    for key in hypers:
        if key not in rule.fields:
            known = ", ".join(rule.fields) or "none"
            return f"unknown hyper-parameter {_show(key)}; known: {known}"
    for key, field in rule.fields.items():
        if key not in hypers:
            return f"{key} is missing; give {field.form.value}"
        problem = _find_in_value(field, hypers[key])
        if problem is not None:
            return f"{key} is {_show(hypers[key])} and {problem}"
    if hypers.get("nesterov") and (not hypers["momentum"] or hypers["dampening"]):
        return "nesterov needs a momentum above 0 and a dampening of 0"
    return None


def _find_in_value(field: Field, value: object) -> str | None:
    if field.form is Form.FLAG:
        return None if isinstance(value, bool) else "must be true or false"
    numbers: tuple[object, ...]
    if field.form is Form.PAIR:
        if not isinstance(value, tuple) or len(value) != 2:
            return "must be a pair of numbers"
        numbers = value
    else:
        numbers = (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            return f"must be {field.form.value}"
        if not math.isfinite(number):
            return "must be finite"
        if not field.low <= number <= field.high or (field.open and number == field.high):
            return f"must be at least {field.low:g} and {'below' if field.open else 'at most'} {field.high:g}"
    return None


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
