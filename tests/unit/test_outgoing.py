"""Contributions on their way out: what is left out of one goes with the next of the same slice position."""

from __future__ import annotations

import pytest
import torch

from paramserver.compress.options import Wire
from paramserver.core.layout.plan import Kind, Layout, TensorSpec, make_layout
from paramserver.tensors.dtypes import buffer_of
from paramserver.worker.flat import FlatSpace, PartialSum
from paramserver.worker.gradients.outgoing import Outgoing

CPU = torch.device("cpu")
WEIGHT, BIAS, DOUBLE, MEAN = range(4)


@pytest.fixture
def layout() -> Layout:
    """Four chunks: weight and bias share the first two, then float64, then a buffer."""
    tensors = (
        TensorSpec("weight", (300,), "float32"),
        TensorSpec("bias", (5,), "float32"),
        TensorSpec("double", (7,), "float64"),
        TensorSpec("mean", (9,), "float32", Kind.BUFFER),
    )
    return make_layout(tensors, 1024)


def contribution(layout: Layout, seed: int, *used: int) -> PartialSum:
    partial = PartialSum(FlatSpace(layout, CPU, (Kind.PARAMETER, Kind.BUFFER)), 4)
    generator = torch.Generator().manual_seed(seed)
    for tensor in used:
        view = partial.space.view(tensor)
        view.copy_(torch.randn(view.shape, generator=generator, dtype=view.dtype))
        partial.used.add(tensor)
    return partial


def out(push: str) -> Outgoing:
    return Outgoing(Wire(push, 0.05))


def test_without_compression_nothing_is_lossy() -> None:
    assert not Outgoing().lossy
    assert not Outgoing().keeps
    assert out("bf16").lossy
    assert not out("bf16").keeps
    assert out("int8").keeps


@pytest.mark.parametrize("push", ["bf16", "fp16", "int8", "topk"])
def test_servers_read_what_the_node_holds_then(push: str, layout: Layout) -> None:
    """Only trained float32 is compressed, and the partial sum holds what comes out at the other end."""
    outgoing, partial = out(push), contribution(layout, 1, WEIGHT, BIAS, DOUBLE, MEAN)
    before = contribution(layout, 1, WEIGHT, BIAS, DOUBLE, MEAN)
    encoded = outgoing.encode(0, partial, partial.space, flush=False)
    assert set(encoded) == {0, 1}
    assert outgoing.compressor is not None
    for index, made in encoded.items():
        chunk = layout.chunks[index]
        read = outgoing.compressor.decode(buffer_of(made.payload), chunk.elements)
        assert read.equal(partial.space.chunk(index))
    for tensor in (DOUBLE, MEAN):
        assert partial.space.view(tensor).equal(before.space.view(tensor))
    assert not partial.space.view(WEIGHT).equal(before.space.view(WEIGHT))


@pytest.mark.parametrize("ratio", [0.4, 0.7, 1.0])
def test_what_would_become_larger_is_sent_as_it_is(ratio: float, layout: Layout) -> None:
    """Top-k of more than half of the numbers: servers read the same numbers, in fewer bytes."""
    outgoing, partial = Outgoing(Wire("topk", ratio)), contribution(layout, 1, WEIGHT, BIAS)
    before = contribution(layout, 1, WEIGHT, BIAS)
    encoded = outgoing.encode(0, partial, partial.space, flush=False)
    assert set(encoded) == ({0, 1} if ratio < 0.5 else set())
    weights, all_weights = partial.space.view(WEIGHT), before.space.view(WEIGHT)
    assert bool((weights == 0).any()) == (ratio < 1.0)
    assert weights[weights != 0].equal(all_weights[weights != 0])


@pytest.mark.parametrize("push", ["int8", "topk"])
def test_nothing_gets_lost(push: str, layout: Layout) -> None:
    """What has been sent until a flush adds up to what the gradients were."""
    outgoing = out(push)
    sent = torch.zeros(300, dtype=torch.float64)
    wanted = torch.zeros(300, dtype=torch.float64)
    for step in range(6):
        partial = contribution(layout, step, WEIGHT, BIAS)
        wanted += partial.space.view(WEIGHT)
        encoded = outgoing.encode(2, partial, partial.space, flush=step == 5)
        assert bool(encoded) == (step != 5)
        sent += partial.space.view(WEIGHT)
        if step == 2:
            assert float((sent - wanted).abs().max()) > 1e-3
    assert torch.allclose(sent, wanted, atol=1e-4)
    assert outgoing.keep(()) == 0


def test_positions_do_not_touch_each_other(layout: Layout) -> None:
    def sent(positions: list[int]) -> torch.Tensor:
        outgoing = out("topk")
        for step, position in enumerate(positions):
            partial = contribution(layout, 50 if step == len(positions) - 1 else step, WEIGHT)
            outgoing.encode(position, partial, partial.space, flush=False)
        return partial.space.view(WEIGHT)

    assert sent([1, 1, 0]).equal(sent([0]))
    assert not sent([0, 0, 0]).equal(sent([0]))


def test_a_tensor_without_gradient_keeps_its_part_for_later(layout: Layout) -> None:
    """1. Weight and bias are sent. 2. Only the weight. 3. What is left of the bias comes with the flush."""
    outgoing = out("topk")
    first = contribution(layout, 1, WEIGHT, BIAS)
    wanted = first.space.view(BIAS).clone()
    outgoing.encode(0, first, first.space, flush=False)
    wanted -= first.space.view(BIAS)
    assert bool(wanted.any())
    second = contribution(layout, 2, WEIGHT)
    outgoing.encode(0, second, second.space, flush=False)
    assert second.used == {WEIGHT}
    assert not second.space.view(BIAS).any()
    third = contribution(layout, 3, WEIGHT)
    assert outgoing.encode(0, third, third.space, flush=True) == {}
    assert third.used == {WEIGHT, BIAS}
    assert third.space.view(BIAS).equal(wanted)


def test_a_slice_that_counts_for_nothing_keeps_nothing_at_a_flush(layout: Layout) -> None:
    outgoing = out("int8")
    partial = contribution(layout, 1, WEIGHT)
    outgoing.encode(0, partial, partial.space, flush=False)
    empty = contribution(layout, 2)
    assert outgoing.encode(0, empty, empty.space, flush=False) == {}
    assert outgoing.keep(()) == 1
    outgoing.encode(0, partial, partial.space, flush=False)
    outgoing.encode(0, empty, empty.space, flush=True)
    assert outgoing.keep(()) == 0
    assert empty.used == set()


def test_positions_that_go_to_others_are_forgotten_and_counted(layout: Layout) -> None:
    outgoing = out("int8")
    for position in range(4):
        partial = contribution(layout, 1, WEIGHT)
        outgoing.encode(position, partial, partial.space, flush=False)
    assert outgoing.keep(range(1, 3)) == 2
    assert outgoing.keep(range(1, 3)) == 0
    outgoing.reset()
    assert outgoing.keep(()) == 0
