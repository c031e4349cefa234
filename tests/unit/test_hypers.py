"""Optimizers travel as a name and numbers, and nothing that is not listed gets through."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paramserver.core.layout.hypers import RULES, HyperValue, validate, validate_change
from paramserver.errors import ModelError, ProtocolError
from paramserver.tensors.hypers import from_proto, groups_from_proto, groups_to_proto, to_proto
from paramserver.tensors.optimizers import build, describe, torch_class
from paramserver.v1 import types_pb2 as types

TRAINED = [name for name in RULES if name != "sum"]


def params(count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros(3, 1, requires_grad=True) for _ in range(count)]


def default(name: str) -> dict[str, HyperValue]:
    """The hyper-parameters of the optimizer as torch makes it."""
    kind: Any = torch_class(name)
    found, (hypers,) = describe(kind(params()))
    assert found == name
    return hypers


@pytest.mark.parametrize("name", TRAINED)
def test_every_number_of_torchs_class_is_listed(name: str) -> None:
    """So that a hyper-parameter which a new torch adds is noticed, and not silently dropped."""
    kind: Any = torch_class(name)
    execution = {"params", "foreach", "fused", "capturable", "differentiable"}
    derived = {"decoupled_weight_decay"} if name == "adamw" else set()
    late = {"decoupled_weight_decay"} if name == "adam" else set()  # torch before 2.7 has no such choice
    assert (set(kind(params()).param_groups[0]) | late) - execution - derived == set(RULES[name].fields)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_described_can_be_sent_and_built_again(name: str) -> None:
    hypers = default(name)
    validate(name, [hypers])
    assert from_proto(types.GroupHypers.FromString(to_proto(hypers).SerializeToString())) == hypers
    again = build(name, [params(), [], params(2)], hypers)
    assert describe(again) == (name, [hypers, hypers])


def test_groups_keep_their_own_numbers() -> None:
    one, other = params(2)
    optimizer = torch.optim.AdamW([{"params": [one], "lr": 0.5}, {"params": [other], "weight_decay": 0.0}], lr=0.25)
    name, groups = describe(optimizer)
    assert name == "adamw"
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.5, 0.01), (0.25, 0.0)]
    assert groups_from_proto(groups_to_proto(groups)) == groups


def test_numbers_become_plain_values() -> None:
    """Tensors and whole numbers, which torch allows, travel as floats; a scheduler's entries do not travel."""
    optimizer = torch.optim.Adam(params(), lr=torch.tensor(0.25), betas=(0.0, 0.5), weight_decay=1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    _, (hypers,) = describe(optimizer)
    assert {type(value) for value in hypers.values()} == {float, bool, tuple}
    assert all(type(number) is float for value in hypers.values() if isinstance(value, tuple) for number in value)
    assert set(hypers) == set(RULES["adam"].fields)


def test_execution_flags_are_dropped() -> None:
    assert describe(torch.optim.SGD(params(), lr=0.5, foreach=True)) == describe(torch.optim.SGD(params(), lr=0.5))
    with pytest.raises(ModelError, match="differentiable"):
        describe(torch.optim.SGD(params(), lr=0.5, differentiable=True))


class Mine(torch.optim.SGD):
    """Looks like SGD and may do anything."""


def test_other_classes_are_refused() -> None:
    with pytest.raises(ModelError, match="Mine is not supported; supported: SGD, Adam, AdamW, Adagrad,"):
        describe(Mine(params(), lr=0.5))


BAD: list[tuple[str, str, object, str]] = [
    ("sgd", "lr", -0.1, "at least 0"),
    ("sgd", "lr", math.nan, "finite"),
    ("sgd", "lr", math.inf, "finite"),
    ("sgd", "lr", 1e31, "at most 1e\\+30"),
    ("sgd", "lr", True, "a number"),
    ("sgd", "lr", "0.1", "a number"),
    ("sgd", "lr", (0.1,), "a number"),
    ("sgd", "lr", None, "a number"),
    ("sgd", "dampening", -1e31, "at least"),
    ("sgd", "weight_decay", -1.0, "at least 0"),
    ("sgd", "nesterov", 1.0, "true or false"),
    ("sgd", "nesterov", True, "momentum above 0"),
    ("sgd", "lr.__class__", 1.0, "unknown"),
    ("sgd", "params", 1.0, "unknown"),
    ("sgd", "foreach", True, "unknown"),
    ("sgd", "", 1.0, "unknown"),
    ("sgd", "x" * 10_000, 1.0, "unknown"),
    ("adam", "betas", (0.9, 1.0), "below 1"),
    ("adam", "betas", (-0.1, 0.9), "at least 0"),
    ("adam", "betas", (0.9,), "a pair"),
    ("adam", "betas", (0.9, 0.9, 0.9), "a pair"),
    ("adam", "betas", 0.9, "a pair"),
    ("adam", "betas", (0.9, True), "a pair"),
    ("adam", "betas", (0.9, math.nan), "finite"),
    ("adam", "eps", -1e-8, "at least 0"),
    ("adamw", "decoupled_weight_decay", True, "unknown"),
    ("nadam", "betas", (1 - 1e-9, 0.9), "at most"),
    ("adadelta", "rho", 1.01, "at most 1"),
]


@pytest.mark.parametrize(("name", "key", "value", "problem"), BAD)
def test_bad_values_are_refused_by_name(name: str, key: str, value: object, problem: str) -> None:
    good = default(name)
    with pytest.raises(ModelError, match=problem) as caught:
        validate(name, [good, good | {key: value}])
    assert "group 1" in str(caught.value)
    assert key[:40] in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", TRAINED)
def test_every_number_is_needed(name: str) -> None:
    good = default(name)
    for key in good:
        with pytest.raises(ModelError, match=f"{key} is missing"):
            validate(name, [{other: value for other, value in good.items() if other != key}])


@pytest.mark.parametrize("name", ["", "SGD", "lbfgs", "torch.optim.SGD", "__class__", "x" * 9999])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not supported") as caught:
        validate(name, [{}])
    assert len(str(caught.value)) < 300


def test_sum_takes_no_numbers() -> None:
    validate("sum", [{}, {}])
    with pytest.raises(ModelError, match="unknown hyper-parameter 'lr'; known: none"):
        validate("sum", [{"lr": 0.1}])
    with pytest.raises(ModelError, match="no parameter group"):
        validate("sum", [])


def test_limits_that_are_allowed() -> None:
    validate("sgd", [default("sgd") | {"lr": 0, "momentum": 0.9, "nesterov": True, "dampening": 0.0}])
    validate("sgd", [default("sgd") | {"dampening": -0.5}])
    validate("adam", [default("adam") | {"betas": (0.0, 0.0), "eps": 0.0}])
    validate("adadelta", [default("adadelta") | {"rho": 1.0}])


def test_what_may_change_during_training() -> None:
    adam, rmsprop, sgd = default("adam"), default("rmsprop"), default("sgd")
    validate_change("adam", [adam], [adam | {"lr": 0.5, "betas": (0.1, 0.2), "maximize": True}])
    validate_change("sgd", [sgd], [sgd | {"momentum": 0.9}])
    for name, one, change in (("adam", adam, {"amsgrad": True}), ("rmsprop", rmsprop, {"momentum": 0.9})):
        with pytest.raises(ModelError, match=f"{next(iter(change))} cannot change"):
            validate_change(name, [one], [one | change])
    with pytest.raises(ModelError, match="had 1 parameter groups and now has 2"):
        validate_change("adam", [adam], [adam, adam])
    with pytest.raises(ModelError, match="lr is -1"):
        validate_change("adam", [adam], [adam | {"lr": -1.0}])


def test_messages_are_the_same_for_the_same_numbers() -> None:
    hypers: dict[str, HyperValue] = {"b": True, "a": 0.1, "c": (1.0, 2.0)}
    shuffled: dict[str, HyperValue] = {"c": (1.0, 2.0), "a": 0.1, "b": True}
    assert to_proto(hypers).SerializeToString() == to_proto(shuffled).SerializeToString()
    assert from_proto(to_proto(hypers)) == hypers


def test_broken_messages_are_refused() -> None:
    message = types.GroupHypers(hypers=[types.Hyper(name="lr")])
    with pytest.raises(ProtocolError, match="'lr' has no value"):
        from_proto(message)
    message = types.GroupHypers(hypers=[types.Hyper(name="lr", number=1.0), types.Hyper(name="lr", flag=False)])
    with pytest.raises(ProtocolError, match="twice"):
        groups_from_proto([message])
