"""The optimizers of a job by parameter group: which optimizer a group has, and which numbers and shapes are refused."""

from __future__ import annotations

import pytest
import torch

from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import Kind, TensorSpec, make_layout
from paramserver.errors import ModelError
from paramserver.tensors.hypers import optimizer_to_proto, optimizers_of
from paramserver.tensors.optimizers import describe
from paramserver.v1 import types_pb2

MATRIX = torch.zeros(4, 4)
MUON = describe(torch.optim.Muon([MATRIX]))[1][0]
ADAMW = describe(torch.optim.AdamW([MATRIX]))[1][0]
BOTH = Optimizers(("muon", "adamw"))


def test_one_name_is_that_of_all_groups() -> None:
    one = Optimizers.by_group(["sgd", "sgd", "sgd"])
    assert one.names == ("sgd",)
    assert {one.of(group) for group in range(5)} == {"sgd"}
    assert Optimizers.by_group(["muon", "adamw", "adamw"]).names == ("muon", "adamw", "adamw")
    with pytest.raises(ModelError, match="a parameter is in group 2, and the optimizers have 2"):
        BOTH.of(2)


def test_each_group_has_the_numbers_of_its_optimizer() -> None:
    BOTH.validate([MUON, ADAMW])
    with pytest.raises(ModelError, match="optimizer muon, parameter group 0: unknown hyper-parameter"):
        BOTH.validate([ADAMW, MUON])
    with pytest.raises(ModelError, match=r"optimizer adamw, parameter group 1: lr is -1\.0"):
        BOTH.validate([MUON, {**ADAMW, "lr": -1.0}])
    for optimizers, groups in ((BOTH, [MUON]), (Optimizers(("sum", "adamw")), [{}, ADAMW])):
        with pytest.raises(ModelError, match="do not fit to"):
            optimizers.validate(groups)
    with pytest.raises(ModelError, match="optimizer 'lion' is not supported"):
        Optimizers(("lion", "adamw")).validate([MUON, ADAMW])


def test_a_change_is_refused_for_the_group_that_has_it() -> None:
    BOTH.validate_change([MUON, ADAMW], [{**MUON, "lr": 0.5}, ADAMW])
    with pytest.raises(ModelError, match="optimizer adamw, parameter group 1: amsgrad cannot change"):
        BOTH.validate_change([MUON, ADAMW], [MUON, {**ADAMW, "amsgrad": True}])
    with pytest.raises(ModelError, match="do not fit to 3 parameter groups"):
        BOTH.validate_change([MUON, ADAMW], [MUON, ADAMW, ADAMW])


def test_a_vector_may_be_in_the_group_of_another_optimizer() -> None:
    BOTH.validate_shapes([TensorSpec("m", (3, 5), "float32"), TensorSpec("v", (3,), "float32", group=1)])
    BOTH.validate_shapes([TensorSpec("b", (3,), "float32", Kind.BUFFER)])
    with pytest.raises(ModelError, match=r"'v' has shape \(3,\): give the other tensors an optimizer of their own"):
        BOTH.validate_shapes([TensorSpec("v", (3,), "float32")])


def test_only_tensors_of_the_group_that_needs_it_are_updated_whole() -> None:
    tensors = [TensorSpec("m", (50, 20), "float32"), TensorSpec("v", (1000,), "float32", group=1)]
    chunks = make_layout(tensors, 1024, BOTH.whole).chunks
    assert {chunk.group for chunk in chunks if not chunk.leads} == {0}
    assert sum(chunk.group == 1 and chunk.leads for chunk in chunks) == 4


@pytest.mark.parametrize("optimizers", [BOTH, Optimizers(("sgd",))])
def test_there_and_back_as_a_message(optimizers: Optimizers) -> None:
    raw = optimizer_to_proto(optimizers, []).SerializeToString()
    assert optimizers_of(types_pb2.OptimizerSpec.FromString(raw)) == optimizers
    assert optimizers_of(types_pb2.OptimizerSpec(name="adam")).names == ("adam",), "as checkpoints had it before"
