"""The parts of workers/charlm.py: sizes, text, schedule, loss and samples."""

from __future__ import annotations

import math
import zipfile

import pytest
import torch

from workers.charlm import (
    SIZES,
    CharLM,
    Windows,
    evenly,
    groups,
    loss_of,
    optimizers_of,
    sample,
    standard_library,
    warm_up_and_cosine,
)


def small() -> CharLM:
    torch.manual_seed(0)
    return CharLM(width=32, layers=2, heads=4, context=16)


@pytest.mark.parametrize(("size", "millions"), [("0.5m", 0.5), ("3m", 3), ("10m", 10), ("30m", 30), ("100m", 100)])
def test_sizes_are_what_their_names_say(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = CharLM(*SIZES[size], context=128)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.12)


def test_a_score_depends_on_nothing_that_comes_later() -> None:
    model = small()
    x = torch.arange(16)[None]
    other = x.clone()
    other[0, 10:] = 7
    torch.testing.assert_close(model(x)[:, :10], model(other)[:, :10])
    assert not torch.allclose(model(x)[:, 10:], model(other)[:, 10:])


def test_the_loss_of_a_model_that_knows_nothing_and_that_of_one_that_has_learned() -> None:
    model = small()
    x, y = Windows(b"abc" * 6, 16)[0]
    (optimizer,) = optimizers_of(model, 0.005, 0.1, muon=False)  # 0.02 is too much for some processors
    first = loss_of(model, x[None], y[None], bf16=False).item()
    assert first == pytest.approx(math.log(256), rel=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, x[None], y[None], bf16=True))
        optimizer.step()
    assert loss_of(model, x[None], y[None], bf16=False).item() < 0.1
    assert sample(model, 6, torch.device("cpu"), begin="ab") == "abcabcab"


def test_weight_decay_is_for_matrices_and_each_parameter_is_there_once() -> None:
    model = small()
    matrices, others = groups(model.parameters(), 0.1)
    assert {p.dim() for p in matrices["params"]} == {2}  # type: ignore[attr-defined]
    assert {p.dim() for p in others["params"]} == {1}  # type: ignore[attr-defined]
    both = [*matrices["params"], *others["params"]]  # type: ignore[misc]
    assert {id(p) for p in both} == {id(p) for p in model.parameters()}


def test_with_muon_each_parameter_has_one_optimizer() -> None:
    model = small()
    adamw, muon = optimizers_of(model, 0.01, 0.1, muon=True)
    hidden = {id(p) for group in muon.param_groups for p in group["params"]}
    assert hidden == {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    rest = [id(p) for group in adamw.param_groups for p in group["params"]]
    assert sorted([*hidden, *rest]) == sorted(id(p) for p in model.parameters())


def test_pieces_of_text() -> None:
    data = Windows(b"0123456789", 3)
    assert [bytes(x.tolist()) + bytes(y[-1:].tolist()) for x, y in (data[i] for i in range(len(data)))] == [
        b"0123",
        b"3456",
        b"6789",
    ]
    assert [*evenly(data, 0, 3, 2).indices] == [0, 1]
    assert [*evenly(Windows(bytes(100), 3), 10, 30, 4).indices] == [10, 15, 20, 25]
    assert len(evenly(data, 0, 3, 0)) == 3
    with pytest.raises(ValueError, match="too short for pieces of 10"):
        Windows(b"0123456789", 10)


def test_the_sources_of_the_standard_library() -> None:
    text = standard_library()
    assert len(text) > 5_000_000
    assert zipfile.__doc__ is not None
    assert zipfile.__doc__.encode() in text
    assert b"\x00" not in text


def test_the_schedule_warms_up_and_ends_at_a_tenth() -> None:
    factor = warm_up_and_cosine(4, 104)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factor(54) == pytest.approx(0.55)
    assert factor(104) == factor(200) == pytest.approx(0.1)
    assert warm_up_and_cosine(0, 0)(0) == 1.0
