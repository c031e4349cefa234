"""Unknown names, and models that differ, are described so that the difference can be seen."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from paramserver.core.layout.naming import instead_of
from paramserver.v1 import types_pb2
from paramserver.wire.messages import first_difference


def test_few_names_are_listed_and_of_many_the_nearest_is_named() -> None:
    assert instead_of("x", []) == "there are none"
    assert instead_of("x", ["w", "b"]) == "there are 'w', 'b'"
    names = [f"layers.{i}.attention.{part}.weight" for i in range(50) for part in ("query", "key", "value")]
    assert instead_of("layers.17.attention.qeury.weight", names) == (
        "the nearest of 150 names is 'layers.17.attention.query.weight'"
    )
    assert len(instead_of("y" * 10_000, ["n" * 10_000 + str(i) for i in range(9)])) < 200


def test_twenty_thousand_names_take_no_time() -> None:
    names = [f"{'blocks.' * 20}{i}.weight" for i in range(20_000)]
    began = time.monotonic()
    assert "the nearest of 20000 names is" in instead_of(f"{'blocks.' * 20}77.weigth", names)
    assert time.monotonic() - began < 10.0


def model() -> types_pb2.ModelSpec:
    weight = types_pb2.TensorSpec(name="w", shape=[2], dtype="float32", kind=types_pb2.TENSOR_KIND_PARAMETER)
    count = types_pb2.TensorSpec(name="n", shape=[], dtype="int64", kind=types_pb2.TENSOR_KIND_BUFFER, persistent=True)
    group = types_pb2.GroupHypers(
        hypers=[
            types_pb2.Hyper(name="betas", numbers=types_pb2.Numbers(values=[0.9, 0.999])),
            types_pb2.Hyper(name="lr", number=0.1),
        ]
    )
    optimizer = types_pb2.OptimizerSpec(name="adam", groups=[group])
    return types_pb2.ModelSpec(tensors=[weight, count], optimizer=optimizer, chunk_bytes=64)


Change = Callable[[types_pb2.ModelSpec], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "name": (lambda m: setattr(m.tensors[0], "name", "v"), "tensor 0 is 'v', but 'w' in"),
    "shape": (lambda m: m.tensors[0].shape.append(3), r"'w' is .*\(2, 3\).*, but .*\(2,\)"),
    "type": (lambda m: setattr(m.tensors[0], "dtype", "float64"), "'w' is .* type float64, but .* type float32"),
    "kind": (lambda m: setattr(m.tensors[0], "kind", types_pb2.TENSOR_KIND_FROZEN), "'w' is a frozen .*, but a param"),
    "group": (lambda m: setattr(m.tensors[0], "group", 1), "in parameter group 1, but .* in parameter group 0"),
    "rule": (
        lambda m: setattr(m.tensors[1], "group", 1),
        "'n' is a buffer .* changes are added .*, but .* are averaged",
    ),
    "ties": (lambda m: m.tensors[0].aliases.append("head"), "tied with 'head', but .* tied with nothing"),
    "kept": (lambda m: setattr(m.tensors[1], "persistent", False), "not in the state_dict, but .*, in the state_dict"),
    "fewer": (lambda m: m.tensors.pop(), "'n' is missing here"),
    "optimizer": (lambda m: setattr(m.optimizer, "name", "sgd"), r"optimizer is sgd with 1 .*, but adam with 1 "),
    "groups": (lambda m: m.optimizer.groups.add(), r"adam with 2 parameter group\(s\), but adam with 1 in"),
    "lr": (
        lambda m: setattr(m.optimizer.groups[0].hypers[1], "number", 0.2),
        "lr of parameter group 0 is 0.2, but 0",
    ),
    "betas": (
        lambda m: m.optimizer.groups[0].hypers[0].numbers.values.append(1.0),
        r"betas of parameter group 0 is \(0\.9, 0\.999, 1\.0\), but \(0\.9, 0\.999\)",
    ),
    "no lr": (lambda m: m.optimizer.groups[0].hypers.pop(), "lr of parameter group 0 is nothing, but 0.1"),
    "chunks": (lambda m: setattr(m, "chunk_bytes", 128), "chunk_bytes is 128, but 64"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_two_models_that_differ_are_not_described_alike(what: str) -> None:
    change, text = CHANGES[what]
    ours, theirs = model(), model()
    assert first_difference(ours, theirs) == ""
    change(theirs)
    with pytest.raises(ValueError, match=text):
        raise ValueError(first_difference(ours, theirs))
    described, _, other = (
        first_difference(ours, theirs).removesuffix(" in the model registered first").partition(", but ")
    )
    assert described.partition(" is ")[2] != other
