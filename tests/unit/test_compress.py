"""Each compressor by itself: how large the error is, ties, and what is refused in words."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from paramserver.compress.casts import BF16, FP16, Cast
from paramserver.compress.int8 import BLOCK, Int8
from paramserver.compress.topk import TopK
from paramserver.errors import NonFiniteError, ProtocolError
from paramserver.tensors.dtypes import buffer_of


def numbers(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


# ---- casts


@pytest.mark.parametrize("cast", [BF16, FP16], ids=lambda cast: cast.name)
def test_casts_round_as_torch_does(cast: Cast) -> None:
    values = numbers(4096)
    payload = cast.encode(values, None)
    assert payload.numel() == 2 * 4096
    assert cast.decode(buffer_of(payload), 4096).equal(values.to(cast.dtype).to(torch.float32))


def test_beyond_the_largest_float16_is_the_largest() -> None:
    values = torch.tensor([1e6, -7e4, 65504.0, 0.0] * 4)
    found = FP16.decode(buffer_of(FP16.encode(values, None)), 16)
    assert found.tolist() == [65504.0, -65504.0, 65504.0, 0.0] * 4


# ---- int8


def test_the_error_of_int8_is_half_a_level() -> None:
    values = numbers(10 * BLOCK + 48) ** 3
    found = Int8().decode(buffer_of(Int8().encode(values, None)), values.numel())
    for start in range(0, values.numel(), BLOCK):
        block, error = values[start : start + BLOCK], (values - found)[start : start + BLOCK]
        assert float(error.abs().max()) <= float(block.abs().max()) / 254 * 1.0001


def test_int8_takes_little_more_than_a_byte() -> None:
    assert 4 * (1 << 20) / Int8().encode(numbers(1 << 20), None).numel() > 3.9


def test_a_large_number_in_one_block_does_not_touch_another() -> None:
    values = numbers(2 * BLOCK)
    alone = values[BLOCK:].clone()
    values[3] = 1e9
    found = Int8().decode(buffer_of(Int8().encode(values, None)), 2 * BLOCK)
    assert found[BLOCK:].equal(Int8().decode(buffer_of(Int8().encode(alone, None)), BLOCK))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40, 3e38])
@pytest.mark.parametrize("block", [0, 1])
def test_scales_of_int8_are_checked(scale: float, block: int) -> None:
    payload = Int8().encode(numbers(2 * BLOCK), None)
    payload[: 4 * 2].view(torch.float32)[block] = scale
    with pytest.raises(ProtocolError, match="a scale of int8 is zero, negative, not finite or beyond"):
        Int8().decode(buffer_of(payload), 2 * BLOCK)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_sent(bad: float) -> None:
    values = numbers(2 * BLOCK)
    values[-1] = bad
    for compressor in (Int8(), TopK(0.1)):
        with pytest.raises(NonFiniteError):
            compressor.encode(values, None)


# ---- top-k


def test_topk_sends_the_largest() -> None:
    values = torch.zeros(160)
    values[torch.tensor([3, 50, 51, 159])] = torch.tensor([-9.0, 2.0, -3.0, 0.5])
    found = TopK(3 / 160).decode(buffer_of(TopK(3 / 160).encode(values, None)), 160)
    assert found.nonzero().view(-1).tolist() == [3, 50, 51]
    assert found[[3, 50, 51]].tolist() == [-9.0, 2.0, -3.0]


def test_of_equal_magnitudes_the_first_ones_are_sent() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, -1.0] * 40)
    found = TopK(0.25).decode(buffer_of(TopK(0.25).encode(values, None)), 160)
    assert found.nonzero().view(-1).tolist() == [i for i in range(80) if i % 4 in (1, 2)]


def test_at_least_one_number_is_sent() -> None:
    values = numbers(16)
    found = TopK(0.01).decode(buffer_of(TopK(0.01).encode(values, None)), 16)
    assert int(found.count_nonzero()) == 1
    assert int(found.abs().argmax()) == int(values.abs().argmax())


def places(*wanted: int) -> bytes:
    """A payload of ones at these places."""
    made = struct.pack(f"<I{len(wanted)}i{len(wanted)}f", len(wanted), *wanted, *[1.0] * len(wanted))
    return made + bytes(-len(made) % 64)


@pytest.mark.parametrize("wanted", [(5, 5, 7), (7, 5, 8), (-1, 2, 3), (1, 2, 64), (1, 2, 2**31 - 1)])
def test_places_must_rise_within_the_chunk(wanted: tuple[int, ...]) -> None:
    assert TopK().decode(places(1, 2, 63), 64).nonzero().view(-1).tolist() == [1, 2, 63]
    with pytest.raises(ProtocolError, match="the places of top-k must rise within the 64 elements"):
        TopK().decode(places(*wanted), 64)


@pytest.mark.parametrize("count", [0, 8, 65, 2**32 - 1])
def test_a_count_that_is_not_there_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=r"top-k claims|take \d+ bytes"):
        TopK().decode(struct.pack("<I", count) + places(1, 2, 3)[4:], 64)


def test_a_thousandfold_expansion_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ProtocolError, match="64 bytes of topk would become 4000000000, more than 1000 times as many"):
        TopK().check(64, 1_000_000_000)


@pytest.mark.parametrize("ratio", [0.0, 0.0009, 1.1, math.nan])
def test_the_ratio_of_topk_has_limits(ratio: float) -> None:
    with pytest.raises(ValueError, match="the ratio of top-k must be from"):
        TopK(ratio)
