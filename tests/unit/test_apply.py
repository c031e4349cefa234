"""Chunks updated by themselves end where torch.optim ends on whole tensors; sums follow the tree bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paramserver.core.layout.hypers import RULES, HyperValue, validate
from paramserver.core.layout.plan import Kind, Layout, TensorSpec, make_layout
from paramserver.core.versions.reduction import Node, cover, split
from paramserver.errors import ModelError
from paramserver.server.arithmetic.apply import ChunkState
from paramserver.server.arithmetic.combine import TILE, Sum, combine
from paramserver.tensors.dtypes import tensor_from, torch_dtype
from paramserver.tensors.finite import are_finite, is_finite
from paramserver.tensors.optimizers import describe
from paramserver.tensors.private import FUSED
from tests.support.unit.arithmetic import torch_only

SHAPES = ((7, 5), (3,), (), (40,), (2, 3, 3), (1,), (65,))
STEPS = 10

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.05, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.95)}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.2, "amsgrad": True, "eps": 1e-6}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.02, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.8, "centered": True, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.01}),
    ("RAdam", {"lr": 0.01, "betas": (0.9, 0.9)}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("Adamax", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.7, 0.9)}),
    ("Adadelta", {"lr": 1.0}),
    ("Adadelta", {"lr": 1.0, "rho": 0.8, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 3.0, "lambd": 0.01, "alpha": 0.6, "weight_decay": 0.1, "maximize": True}),
    ("Rprop", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01, "etas": (0.4, 1.3), "step_sizes": (1e-3, 0.5), "maximize": True}),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(SETTINGS)]
ALL = frozenset(range(len(SHAPES)))
SCALARS = frozenset(("step", "mu_product", "eta", "mu"))


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds with compiled kernels and without."""
    with nullcontext() if request.param == "compiled" else torch_only():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Chunked:
    """All chunks of a model, as a server holds them."""

    def __init__(self, tensors: Sequence[Tensor], chunk_bytes: int, optimizer: str, dtype: str) -> None:
        specs = [TensorSpec(f"t{number}", tuple(t.shape), dtype) for number, t in enumerate(tensors)]
        self.layout: Layout = make_layout(specs, chunk_bytes)
        self.states = [ChunkState(chunk, optimizer) for chunk in self.layout.chunks]
        self.weights = self.flatten(tensors)

    def flatten(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Per chunk; missing tensors are zeros."""
        flats = []
        for chunk in self.layout.chunks:
            flat = torch.zeros(chunk.elements, dtype=torch_dtype(chunk.dtype))
            for piece in chunk.pieces:
                tensor = tensors[piece.tensor]
                if tensor is not None:
                    part = tensor.detach().reshape(-1)[piece.tensor_start : piece.tensor_start + piece.elements]
                    flat[piece.chunk_start : piece.chunk_start + piece.elements] = part
            flats.append(flat)
        return flats

    def step(self, gradients: Sequence[Tensor | None], hypers: dict[str, HyperValue]) -> None:
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        flat = self.flatten(gradients)
        old, before, kept = self.weights, [w.clone() for w in self.weights], [g.clone() for g in flat]
        parts = zip(self.states, self.weights, flat, strict=True)
        self.weights = [state.step(weights, gradient, used, hypers) for state, weights, gradient in parts]
        assert all(map(torch.equal, old, before)), "the old version was written to"
        assert all(map(torch.equal, flat, kept)), "a gradient was written to"

    def tensors(self) -> list[Tensor]:
        return [self.gather(number, self.weights) for number in range(len(self.layout.tensors))]

    def gather(self, number: int, flats: Sequence[Tensor]) -> Tensor:
        parts = [
            flats[chunk.index][piece.chunk_start : piece.chunk_start + piece.elements]
            for chunk in self.layout.chunks
            for piece in chunk.pieces
            if piece.tensor == number
        ]
        return torch.cat(parts).reshape(self.layout.tensors[number].shape)

    def padding(self) -> Tensor:
        """Everything in the weights that belongs to no tensor."""
        parts = [torch.zeros(0, dtype=torch.float64)]
        for chunk, flat in zip(self.layout.chunks, self.weights, strict=True):
            inside = torch.zeros(chunk.elements, dtype=torch.bool)
            for piece in chunk.pieces:
                inside[piece.chunk_start : piece.chunk_start + piece.elements] = True
            parts.append(flat[~inside].double())
        return torch.cat(parts)


def make(name: str, settings: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in SHAPES]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(tensors, **settings)
    return tensors, optimizer


def gradients_of_step(step: int, dtype: torch.dtype, used: frozenset[int]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    drawn = [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]
    return [gradient if number in used else None for number, gradient in enumerate(drawn)]


def come_and_go(step: int) -> frozenset[int]:
    """Tensor 6 is never used, 0 always, the others now and then; in step 3 nothing is."""
    if step == 3:
        return frozenset()
    return frozenset(n for n in range(len(SHAPES)) if n != 6 and (n == 0 or (step * (n + 3)) % 5 < 3))


def train(
    chunked: Chunked,
    tensors: list[Tensor],
    optimizer: torch.optim.Optimizer,
    steps: range,
    partly: bool,
) -> None:
    """The same steps with torch.optim and in chunks, with a learning rate that changes at every step."""
    start = float(optimizer.param_groups[0]["lr"])
    for step in steps:
        used = come_and_go(step) if partly else ALL
        gradients = gradients_of_step(step, tensors[0].dtype, used)
        optimizer.param_groups[0]["lr"] = start * (1 + (step % 3)) / 2
        _, (hypers,) = describe(optimizer)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
        chunked.step(gradients, hypers)
        optimizer.param_groups[0]["lr"] = start


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(a.detach().numpy().tobytes() == b.detach().numpy().tobytes() for a, b in zip(one, other, strict=True))


# Each type and each way with every `make test`, all four pairs with `make test-long`.
@pytest.mark.parametrize(
    ("dtype", "partly"),
    [
        pytest.param("float32", True, id="float32-partly"),
        pytest.param("float64", False, id="float64-all"),
        pytest.param("float32", False, id="float32-all", marks=pytest.mark.long),
        pytest.param("float64", True, id="float64-partly", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_chunks_of_any_size_end_where_torch_ends(name: str, settings: dict[str, Any], dtype: str, partly: bool) -> None:
    """Weights and state after ten steps; bit by bit, but for the fused kernels, which round in other places."""
    for chunk_bytes in (64, 192, 320, 16384):
        tensors, optimizer = make(name, settings, torch_dtype(dtype))
        chunked = Chunked(tensors, chunk_bytes, name.lower(), dtype)
        train(chunked, tensors, optimizer, range(STEPS), partly)
        tolerance = (1e-12 if dtype == "float64" else 1e-6) if name.lower() in FUSED else 0.0
        for mine, theirs in zip(chunked.tensors(), tensors, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=tolerance, atol=tolerance)
        check_state(chunked, tensors, optimizer, tolerance)
        assert not chunked.padding().any()


def check_state(chunked: Chunked, tensors: list[Tensor], optimizer: torch.optim.Optimizer, tolerance: float) -> None:
    """What is exported is what torch has, but that Adagrad also has state for what was never used."""
    seen: dict[tuple[int, str], int] = {}
    for state in chunked.states:
        order = []
        for tensor, key, start, data, scalar in state.export():
            theirs = optimizer.state[tensors[tensor]][key].detach().reshape(-1)
            if not scalar:
                theirs = theirs[start : start + data.numel()]
            torch.testing.assert_close(data, theirs, rtol=tolerance, atol=tolerance)
            seen[tensor, key] = seen.get((tensor, key), 0) + data.numel()
            assert scalar == (key in SCALARS)
            order.append((tensor, key))
        assert order == sorted(order)
    for number, parameter in enumerate(tensors):
        theirs = optimizer.state.get(parameter, {})
        if theirs.get("step") != 0:
            for key, value in theirs.items():
                assert seen[number, key] == value.numel() or key in SCALARS


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_saved_and_loaded_state_goes_on_with_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    """Also when some tensors were used less often, and into fresh states."""
    tensors, optimizer = make(name, settings, torch.float32)
    chunked = Chunked(tensors, 320, name.lower(), "float32")
    train(chunked, tensors, optimizer, range(5), partly=True)
    other = Chunked(chunked.tensors(), 320, name.lower(), "float32")
    for mine, theirs in zip(other.states, chunked.states, strict=True):
        mine.load([(t, key, start, data.clone(), scalar) for t, key, start, data, scalar in theirs.export()])
    for step in range(5, STEPS):
        gradients = gradients_of_step(step, torch.float32, come_and_go(step) if step % 2 else ALL)
        _, (hypers,) = describe(optimizer)
        chunked.step(gradients, hypers)
        other.step(gradients, hypers)
        assert same_bits(chunked.weights, other.weights)
    for mine, theirs in zip(other.states, chunked.states, strict=True):
        for ours, yours in zip(mine.export(), theirs.export(), strict=True):
            assert ours[:3] == yours[:3]
            assert same_bits([ours[3]], [yours[3]])


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_state_moves_to_chunks_of_another_size(name: str, settings: dict[str, Any]) -> None:
    tensors, optimizer = make(name, settings, torch.float64)
    small, large = (Chunked(tensors, size, name.lower(), "float64") for size in (128, 16384))
    train(small, tensors, optimizer, range(5), partly=True)
    entries = [(t, k, at, data.clone(), s) for state in small.states for t, k, at, data, s in state.export()]
    large.weights = large.flatten(small.tensors())
    for state in large.states:
        state.load(reversed(entries))
    small_start = [w.clone() for w in small.weights]
    train(large, tensors, optimizer, range(5, STEPS), partly=True)
    for mine, theirs in zip(large.tensors(), tensors, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)
    assert same_bits(small.weights, small_start)


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_how_a_chunk_falls_into_runs_does_not_show(name: str, settings: dict[str, Any]) -> None:
    """Runs end at multiples of 64 bytes, so one run or many give the same bits: cutting finer changes nothing."""
    results = []
    for chunk_bytes in (64, 192, 16384):
        tensors, optimizer = make(name, settings, torch.float32)
        chunked = Chunked(tensors, chunk_bytes, name.lower(), "float32")
        train(chunked, tensors, optimizer, range(STEPS), partly=True)
        results.append(chunked.tensors())
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD"])
def test_a_large_chunk_is_updated_in_tiles_with_the_same_bits(name: str) -> None:
    """More elements than fit into one tile, beside a small tensor that is used less often."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(size, generator=generator).requires_grad_() for size in (150_001, 9)]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(tensors, lr=0.01, weight_decay=0.1)
    _, (hypers,) = describe(optimizer)
    chunked = Chunked(tensors, 2**20, name.lower(), "float32")
    assert len(chunked.states) == 1
    for step in range(4):
        gradients = [torch.randn(size, generator=generator) for size in (150_001, 9)]
        given = [gradients[0], gradients[1] if step in (0, 2) else None]
        for tensor, gradient in zip(tensors, given, strict=True):
            tensor.grad = gradient
        optimizer.step()
        chunked.step(given, hypers)
    assert same_bits(chunked.tensors(), tensors)
    check_state(chunked, tensors, optimizer, 0.0)


@pytest.mark.parametrize(
    ("name", "settings"), [setting for setting in SETTINGS if setting[0].lower() in FUSED], ids=lambda value: str(value)
)
def test_a_fused_kernel_sees_tiles_and_gives_the_bits_of_whole_tensors(name: str, settings: dict[str, Any]) -> None:
    """Three tiles, the last of them short, of a tensor that is used always, beside one that is used now and then."""
    sizes = (2 * TILE + 48, TILE + 16)
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(tensors, fused=True, **settings)
    _, (hypers,) = describe(optimizer)
    chunked = Chunked(tensors, 2**22, name.lower(), "float32")
    assert len(chunked.states) == 1
    for step in range(3):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        given = [gradients[0], gradients[1] if step in (0, 2) else None]
        for tensor, gradient in zip(tensors, given, strict=True):
            tensor.grad = gradient
        optimizer.step()
        chunked.step(given, hypers)
    assert same_bits(chunked.tensors(), tensors)
    check_state(chunked, tensors, optimizer, 0.0)


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_summed_and_updated_at_once_gives_the_bits_of_one_after_the_other(name: str, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    tensor = torch.randn(TILE + 100, generator=generator)
    _, (hypers,) = describe(getattr(torch.optim, name)([tensor.requires_grad_()], **settings))
    once, after = (Chunked([tensor], 2**21, name.lower(), "float32") for _ in range(2))
    for _ in range(3):
        parts = [once.flatten([torch.randn(tensor.shape, generator=generator)])[0] for _ in range(3)]
        nodes = [((number, number + 1), part) for number, part in enumerate(parts)]
        once.weights = [once.states[0].step(once.weights[0], Sum(nodes, 3, 5.0), {0}, hypers)]
        after.weights = [after.states[0].step(after.weights[0], combine(nodes, 3, 5.0), {0}, hypers)]
    assert same_bits(once.weights, after.weights)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adamax", "Adadelta"])
def test_padding_stays_zero_without_an_epsilon(name: str) -> None:
    """0 / 0 in the padding would be found by every later check for NaN."""
    tensors, optimizer = make(name, {"lr": 0.01, "eps": 0.0}, torch.float32)
    chunked = Chunked(tensors, 16384, name.lower(), "float32")
    train(chunked, tensors, optimizer, range(3), partly=True)
    train(chunked, tensors, optimizer, range(3), partly=False)
    assert not chunked.padding().any()
    for mine, theirs in zip(chunked.tensors(), tensors, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_momentum_switched_on_later_follows_torch() -> None:
    tensors, optimizer = make("SGD", {"lr": 0.1}, torch.float64)
    chunked = Chunked(tensors, 320, "sgd", "float64")
    for step in range(STEPS):
        optimizer.param_groups[0]["momentum"] = 0.0 if step in (0, 1, 6) else 0.9
        train(chunked, tensors, optimizer, range(step, step + 1), partly=step < 8)
    for mine, theirs in zip(chunked.tensors(), tensors, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "change"),
    [("Adam", {"lr": 0.1}, {"amsgrad": True}), ("RMSprop", {"lr": 0.1, "momentum": 0.5}, {"momentum": 0.0})],
)
def test_state_that_was_not_kept_cannot_be_asked_for_later(
    name: str, settings: dict[str, Any], change: dict[str, Any]
) -> None:
    """Refused at once, also after a load, and without a change."""
    tensors, optimizer = make(name, settings, torch.float32)
    chunked = Chunked(tensors, 16384, name.lower(), "float32")
    train(chunked, tensors, optimizer, range(1), partly=False)
    _, (hypers,) = describe(optimizer)
    state, weights = chunked.states[0], chunked.weights[0]
    restored = ChunkState(state.chunk, name.lower())
    restored.load(list(state.export()))
    for one in (state, restored):
        with pytest.raises(ModelError, match=next(iter(change))):
            one.step(weights, torch.ones_like(weights), ALL, hypers | change)
    again = [s.step(weights, torch.ones_like(weights), ALL, hypers) for s in (state, restored)]
    assert same_bits([again[0]], [again[1]])


def test_sum_adds_what_is_used() -> None:
    tensors, _ = make("SGD", {"lr": 1.0}, torch.float32)
    chunked = Chunked(tensors, 192, "sum", "float32")
    expected = [tensor.detach().clone() for tensor in tensors]
    for step in range(4):
        gradients = gradients_of_step(step, torch.float32, ALL if step == 1 else come_and_go(step))
        chunked.step(gradients, {})
        for tensor, gradient in zip(expected, gradients, strict=True):
            if gradient is not None:
                tensor += gradient
    assert same_bits(chunked.tensors(), expected)
    assert all(not list(state.export()) for state in chunked.states)


def test_weights_without_any_gradient_are_the_same_object() -> None:
    chunked = Chunked([torch.ones(5)], 0, "adamw", "float32")
    weights = chunked.weights[0]
    assert chunked.states[0].step(weights, torch.zeros_like(weights), (), {}) is weights
    assert list(chunked.states[0].export()) == []


def test_step_into_given_memory() -> None:
    tensors, optimizer = make("AdamW", {"lr": 0.1}, torch.float32)
    _, (hypers,) = describe(optimizer)
    one, other = (Chunked(tensors, 16384, "adamw", "float32") for _ in range(2))
    weights = one.weights[0]
    out = torch.full_like(weights, math.nan)
    assert one.states[0].step(weights, torch.ones_like(weights), ALL, hypers, out) is out
    assert same_bits([out], [other.states[0].step(weights, torch.ones_like(weights), ALL, hypers)])


def test_incomplete_or_foreign_state_is_refused() -> None:
    tensors, optimizer = make("AdamW", {"lr": 0.1}, torch.float32)
    chunked = Chunked(tensors, 16384, "adamw", "float32")
    train(chunked, tensors, optimizer, range(1), partly=False)
    state = chunked.states[0]
    entries = list(state.export())
    fresh = ChunkState(state.chunk, "adamw")
    with pytest.raises(ModelError, match="exp_avg of tensor 0 is incomplete"):
        fresh.load(entries[1:])
    with pytest.raises(ModelError, match="incomplete"):
        fresh.load([*entries, entries[0]])
    with pytest.raises(ModelError, match="has no state 'exp_avg'"):
        ChunkState(state.chunk, "sgd").load(entries)
    fresh.load([(1000, "other", 0, torch.ones(1), False)])
    assert list(fresh.export()) == []


def test_unknown_optimizer_and_wrong_chunk_are_refused() -> None:
    layout = make_layout([TensorSpec("w", (3,), "float32"), TensorSpec("b", (3,), "float32", Kind.BUFFER)])
    with pytest.raises(ModelError, match="not supported"):
        ChunkState(layout.chunks[0], "lbfgs")
    with pytest.raises(AssertionError):
        ChunkState(layout.chunks[1], "sgd")


def test_every_optimizer_of_the_table_is_tested_here() -> None:
    whole = {name for name, rule in RULES.items() if rule.whole}  # see test_whole.py
    assert {name.lower() for name, _ in SETTINGS} | {"sum"} | whole == set(RULES)
    for name, settings in SETTINGS:
        _, optimizer = make(name, settings, torch.float32)
        validate(*describe(optimizer))


# --- combine ------------------------------------------------------------------------------------------------------


def drawn(count: int, elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    scales = [10.0 ** (number % 7 - 3) for number in range(count)]
    return [torch.randn(elements, dtype=dtype, generator=generator) * scale for scale in scales]


def by_hand(node: Node, of: int, leaves: Sequence[Tensor]) -> Tensor:
    """The tree written out."""
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    left, right = split(node, of)
    return by_hand(left, of, leaves) + by_hand(right, of, leaves)


@pytest.mark.parametrize("of", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("elements", [16, TILE + 1000])
def test_combine_is_the_pairwise_sum_divided(of: int, elements: int) -> None:
    leaves = drawn(of, elements)
    copies = [leaf.clone() for leaf in leaves]
    result = combine([((i, i + 1), leaf) for i, leaf in enumerate(leaves)], of, 7.0)
    assert same_bits([result], [by_hand((0, of), of, leaves) / 7.0])
    assert same_bits(leaves, copies)


def test_pairwise_sum_of_five_written_out() -> None:
    a, b, c, d, e = drawn(5, 333, torch.float64)
    nodes = [((4, 5), e), ((1, 2), b), ((0, 1), a), ((3, 4), d), ((2, 3), c)]
    assert same_bits([combine(nodes, 5, 3.0)], [(((a + b) + (c + d)) + e) / 3.0])
    assert not same_bits([combine(nodes, 5, 3.0)], [((((a + b) + c) + d) + e) / 3.0])


@pytest.mark.parametrize("of", [6, 11])
def test_who_added_before_does_not_show(of: int) -> None:
    """The slices are cut into ranges at two places, and each range comes as few nodes as possible."""
    leaves = drawn(of, 1000)
    expected = combine([((i, i + 1), leaf) for i, leaf in enumerate(leaves)], of, 5.0)
    for one in range(of + 1):
        for other in range(one, of + 1):
            nodes = [*cover(0, one, of), *cover(one, other, of), *cover(other, of, of)]
            parts = [(node, by_hand(node, of, leaves)) for node in reversed(nodes)]
            assert same_bits([combine(parts, of, 5.0)], [expected])


def test_combine_of_one_subtree() -> None:
    leaves = drawn(8, 100)
    parts = [((i, i + 1), leaves[i]) for i in range(4, 8)]
    assert same_bits([combine(parts, 8, 1.0)], [by_hand((4, 8), 8, leaves)])


def test_combine_refuses_gaps() -> None:
    leaves = drawn(3, 10)
    with pytest.raises(ValueError, match="tile"):
        combine([((0, 1), leaves[0]), ((2, 3), leaves[2])], 3, 1.0)


def test_combine_and_step_read_memory_that_cannot_be_written() -> None:
    """Received bytes are used in place; a write into them would end the process or change a constant."""
    raw = np.arange(64, dtype=np.float32).tobytes()
    received = tensor_from(raw, "float32")
    single = combine([((0, 1), received)], 1, 1.0)
    assert single.data_ptr() == received.data_ptr()
    assert same_bits([combine([((0, 1), received)], 1, 2.0)], [received / 2])
    assert same_bits([combine([((0, 1), received), ((1, 2), received)], 2, 2.0)], [received])
    chunk = make_layout([TensorSpec("w", (64,), "float32")]).chunks[0]
    state = ChunkState(chunk, "sgd")
    _, optimizer = make("SGD", {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}, torch.float32)
    _, (hypers,) = describe(optimizer)
    for _ in range(2):
        state.step(received, single, {0}, hypers)
    assert raw == np.arange(64, dtype=np.float32).tobytes()


def test_combine_into_given_memory() -> None:
    a, b = drawn(2, 100)
    for nodes, of in (([((0, 1), a), ((1, 2), b)], 2), ([((0, 1), a)], 1)):
        for divisor in (1.0, 4.0):
            out = torch.empty_like(a)
            assert combine(nodes, of, divisor, out) is out
            assert same_bits([out], [combine(nodes, of, divisor)])


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 1024.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_rounds_once_when_it_is_divided(divisor: float, dtype: torch.dtype) -> None:
    """Also where the quotient is too small to keep all its digits."""
    tiny = torch.finfo(dtype).tiny
    leaves = [leaf * tiny * 3 for leaf in drawn(3, 1000, dtype)]
    nodes = [((number, number + 1), leaf) for number, leaf in enumerate(leaves)]
    assert same_bits([combine(nodes, 3, divisor)], [((leaves[0] + leaves[1]) + leaves[2]) / divisor])


def test_a_sum_notes_whether_what_was_asked_for_is_finite() -> None:
    values = torch.zeros(3 * TILE)
    values[2 * TILE] = math.inf
    nodes = [((0, 1), values), ((1, 2), torch.zeros(3 * TILE))]
    parts = {stop: Sum(nodes, 2, look=True) for stop in (2 * TILE, 3 * TILE)}
    assert {stop: len(list(part.tiles(0, stop))) for stop, part in parts.items()} == {2 * TILE: 2, 3 * TILE: 3}
    assert [part.finite for part in parts.values()] == [True, False]
    for nodes_ in (nodes, nodes[:1]):
        whole = Sum(nodes_, len(nodes_), look=True)
        whole.whole()
        assert not whole.finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite(dtype: torch.dtype) -> None:
    """A sum that overflows is no proof; two infinities of opposite sign do not cancel."""
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((1000,), largest, dtype=dtype))
    assert is_finite(torch.tensor([largest, -largest, 0.0], dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 500, 999):
            values = torch.full((1000,), largest, dtype=dtype)
            values[place] = bad
            assert not is_finite(values)
    assert not is_finite(torch.tensor([math.inf, -math.inf], dtype=dtype))


def test_several_are_finite_together() -> None:
    """Also where what they add up to is not, or is only in their own type."""
    largest = torch.finfo(torch.float32).max
    ones, wide = torch.ones(3), torch.full((3,), 1e300, dtype=torch.float64)
    assert are_finite([])
    assert are_finite([ones])
    assert are_finite([ones, wide])
    assert are_finite([torch.full((9,), largest), torch.full((9,), -largest)])
    for bad in (math.nan, math.inf):
        assert not are_finite([ones, wide, torch.tensor([bad])])
        assert not are_finite([torch.tensor([bad]), torch.tensor([-bad])])
