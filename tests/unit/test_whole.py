"""Optimizers that need whole tensors: the state of a chunk makes torch's bits, and goes on after it was saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paramserver.core.layout.hypers import RULES, validate, validate_change, validate_shape
from paramserver.core.layout.plan import Layout, TensorSpec, joined, make_layout, units
from paramserver.errors import ModelError
from paramserver.server.arithmetic.state import State, StateEntry
from paramserver.server.arithmetic.whole import WholeState, state_of
from paramserver.tensors.dtypes import torch_dtype
from paramserver.tensors.optimizers import describe, torch_hypers

MATRICES = ((7, 5), (40, 16), (1, 9))
SHAPES = (*MATRICES, (3,), (), (2, 3, 4), (65,))
STEPS = 6

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adafactor", {}),
    ("Adafactor", {"lr": 0.05, "eps": (1e-8, 1e-2), "d": 2.0, "weight_decay": 0.1, "beta2_decay": -0.5}),
    ("Adafactor", {"lr": 0.02, "maximize": True}),
    ("Muon", {"lr": 0.02}),
    ("Muon", {"lr": 0.02, "nesterov": False, "ns_steps": 3, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
    ("Muon", {"lr": 0.02, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-6, "adjust_lr_fn": "original"}),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(SETTINGS)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As in the processes of servers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Held:
    """All chunks of a model, joined as servers update them."""

    def __init__(self, tensors: Sequence[Tensor], chunk_bytes: int, optimizer: str, dtype: str) -> None:
        specs = [TensorSpec(f"t{number}", tuple(t.shape), dtype) for number, t in enumerate(tensors)]
        self.layout: Layout = make_layout(specs, chunk_bytes, whole=lambda group: True)
        self.chunks = [joined(unit) for unit in units(self.layout.chunks)]
        self.states: list[State] = [state_of(chunk, optimizer, self.layout) for chunk in self.chunks]
        self.weights = self.flatten(tensors)

    def flatten(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """By chunk; missing tensors are zeros."""
        flats = [torch.zeros(chunk.elements, dtype=torch_dtype(chunk.dtype)) for chunk in self.chunks]
        for chunk, flat in zip(self.chunks, flats, strict=True):
            for piece in chunk.pieces:
                if (tensor := tensors[piece.tensor]) is not None:
                    flat[piece.chunk_start : piece.chunk_start + piece.elements] = tensor.detach().reshape(-1)
        return flats

    def step(self, gradients: Sequence[Tensor | None], hypers: Any) -> None:
        used = {number for number, gradient in enumerate(gradients) if gradient is not None}
        flat, old = self.flatten(gradients), [weights.clone() for weights in self.weights]
        kept, before = [one.clone() for one in flat], self.weights
        parts = zip(self.states, self.weights, flat, strict=True)
        self.weights = [state.step(weights, gradient, used, hypers) for state, weights, gradient in parts]
        assert all(map(torch.equal, before, old)), "the old version was written to"
        assert all(map(torch.equal, flat, kept)), "a gradient was written to"

    def tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for chunk, flat in zip(self.chunks, self.weights, strict=True):
            for piece in chunk.pieces:
                part = flat[piece.chunk_start : piece.chunk_start + piece.elements]
                found[piece.tensor] = part.view(self.layout.tensors[piece.tensor].shape)
        return [found[number] for number in range(len(self.layout.tensors))]


def made(name: str, settings: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(7)
    shapes = MATRICES if name == "Muon" else SHAPES
    tensors = [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(tensors, **settings)
    return tensors, optimizer


def train(held: Held, tensors: list[Tensor], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same steps with torch and in chunks; the last tensor is never used, others now and then."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        drawn = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]
        last = len(tensors) - 1
        gradients = [g if n != last and (n == 0 or (step + n) % 3) else None for n, g in enumerate(drawn)]
        optimizer.param_groups[0]["lr"] *= 0.9
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
        held.step(gradients, describe(optimizer)[1][0])


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(a.detach().numpy().tobytes() == b.detach().numpy().tobytes() for a, b in zip(one, other, strict=True))


def entries(held: Held) -> list[StateEntry]:
    return [(*entry[:3], entry[3].clone(), entry[4]) for state in held.states for entry in state.export()]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_chunks_of_any_size_have_the_bits_of_torch(name: str, settings: dict[str, Any], dtype: str) -> None:
    for chunk_bytes in (64, 320, 16384):
        tensors, optimizer = made(name, dict(settings), torch_dtype(dtype))
        held = Held(tensors, chunk_bytes, name.lower(), dtype)
        train(held, tensors, optimizer, range(STEPS))
        assert same_bits(held.tensors(), tensors)
        found = {(tensor, key): data for tensor, key, _, data, _ in entries(held)}
        states = {(n, key): s for n, t in enumerate(tensors) for key, s in optimizer.state.get(t, {}).items()}
        assert found.keys() == states.keys()
        for at, value in states.items():
            assert torch.equal(found[at], value.reshape(-1)), at


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_saved_and_loaded_state_goes_on_with_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    """Into chunks of another size, with each array in two parts; a fork is not touched by what comes after it."""
    tensors, optimizer = made(name, dict(settings), torch.float32)
    held = Held(tensors, 64, name.lower(), "float32")
    train(held, tensors, optimizer, range(3))
    forks = [state.fork() for state in held.states]
    saved = entries(held)
    parts: list[StateEntry] = []
    for tensor, key, start, data, scalar in reversed(saved):
        cut = 0 if scalar else data.numel() // 2
        parts.append((tensor, key, start + cut, data[cut:], scalar))
        if cut:
            parts.append((tensor, key, start, data[:cut], scalar))
    other = Held(held.tensors(), 16384, name.lower(), "float32")
    for state in other.states:
        state.load(parts)
    train(other, tensors, optimizer, range(3, STEPS))
    assert same_bits(other.tensors(), tensors)
    kept = [entry for state in forks for entry in state.export()]
    assert same_bits([entry[3] for entry in kept], [entry[3] for entry in saved])


def test_state_that_is_not_complete_is_refused_and_changes_nothing() -> None:
    tensors, optimizer = made("Adafactor", {}, torch.float32)
    held = Held(tensors, 16384, "adafactor", "float32")
    train(held, tensors, optimizer, range(2))
    (state,) = held.states
    assert isinstance(state, WholeState)
    before = entries(held)
    row = next(entry for entry in before if entry[1] == "row_var")
    for wrong, text in (
        ([entry for entry in before if entry is not row], "row_var of tensor 0 is incomplete"),
        ([*before, row], "incomplete"),
        ([*before, (0, "row_var", 1, row[3], False)], "longer than it can be"),
        ([*before, (0, "variance", 0, row[3], False)], "no state 'variance'"),
        ([*before, (0, "foreign", 0, row[3][:1], True)], "no state 'foreign'"),
    ):
        with pytest.raises(ModelError, match=text):
            state.load(wrong)
        assert same_bits([entry[3] for entry in entries(held)], [entry[3] for entry in before])
    state.load([*before, (99, "row_var", 0, row[3], False)])  # of a tensor that lies elsewhere


def test_numbers_travel_and_come_back_as_torch_has_them() -> None:
    for name, settings in SETTINGS:
        _, optimizer = made(name, dict(settings), torch.float32)
        found, groups = describe(optimizer)
        validate(found, groups)
        theirs = optimizer.param_groups[0]
        back = torch_hypers(found, groups[0])
        assert {key: value for key, value in theirs.items() if key in back} == back
        assert set(theirs) - set(back) <= {"params", "foreach"}
        assert isinstance(back.get("ns_steps", 1), int)
    muon = {**describe(made("Muon", {}, torch.float32)[1])[1][0]}
    for key, value, text in (
        ("adjust_lr_fn", 3.0, "whole number below 3"),
        ("adjust_lr_fn", 0.5, "whole number below 3"),
        ("ns_steps", 2.5, "must be a whole number"),
        ("ns_steps", 100.0, "at most 99"),
        ("ns_coefficients", (1.0, 2.0), "must be three numbers"),
    ):
        with pytest.raises(ModelError, match=text):
            validate_change("muon", [muon], [{**muon, key: value}])


def test_an_optimizer_of_matrices_names_the_tensor_that_is_none() -> None:
    validate_shape("adafactor", "bias", (3,))
    validate_shape("muon", "weight", (2, 3))
    with pytest.raises(ModelError, match=r"Muon trains tensors with 2 dimensions only, and 'bias' has shape \(3,\)"):
        validate_shape("muon", "bias", (3,))
    assert {name for name, rule in RULES.items() if rule.whole} == {name.lower() for name, _ in SETTINGS}


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (torch.optim.LBFGS, "LBFGS is not supported: it calls its closure several times in a step"),
        (torch.optim.SparseAdam, "SparseAdam is not supported: it takes sparse gradients only"),
    ],
)
def test_what_servers_cannot_run_is_refused_with_the_reason(build: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        describe(build([torch.zeros(1, requires_grad=True)]))


def test_every_optimizer_of_torch_is_supported_or_has_a_reason() -> None:
    every = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    }
    assert every - {"LBFGS", "SparseAdam"} == {rule.title for rule in RULES.values() if rule.title}
