"""What every compressor promises, whoever it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from paramserver.compress.base import MAX_EXPANSION, Compressor
from paramserver.compress.options import PUSH_COMPRESSIONS
from paramserver.compress.registry import FOR_PUSH, push_compressor, reader
from paramserver.errors import ProtocolError
from paramserver.tensors.dtypes import buffer_of

# As chunks have them: multiples of 16; around a block of int8, several tiles, and one number of top-k.
LENGTHS = (16, 240, 256, 272, 4096, 65536 + 16, 200_000)


@pytest.fixture(params=[name for name in PUSH_COMPRESSIONS if name != "none"])
def compressor(request: pytest.FixtureRequest) -> Compressor:
    found = push_compressor(request.param)
    assert found is not None
    return found


def numbers(length: int, seed: int = 0) -> torch.Tensor:
    """As gradients are: most small, some large."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator) ** 3 * 1e-3


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "gradients": numbers,
    "zeros": torch.zeros,
    "equal": lambda length: torch.full((length,), -0.25),
    "tiny": lambda length: numbers(length) * 1e-36,
    "huge": lambda length: numbers(length).sign() * torch.finfo(torch.float32).max,
    "one": lambda length: torch.eye(1, length).view(-1) * 3,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_sees_what_the_worker_was_told(compressor: Compressor, kind: str) -> None:
    """Bit by bit, and nothing is infinite."""
    for length in LENGTHS:
        values = KINDS[kind](length)
        before, told = values.clone(), torch.full((length,), torch.nan)
        payload = compressor.encode(values, told)
        assert values.equal(before)
        compressor.check(payload.numel(), length)
        found = compressor.decode(buffer_of(payload), length)
        assert found.view(torch.int32).equal(told.view(torch.int32))
        assert found.dtype is torch.float32
        assert bool(found.isfinite().all())


def test_it_may_write_where_it_reads(compressor: Compressor) -> None:
    values, told = numbers(5008), torch.empty(5008)
    apart = compressor.encode(values, told)
    assert compressor.encode(values, values).equal(apart)
    assert values.equal(told)


def test_the_same_numbers_give_the_same_bytes(compressor: Compressor) -> None:
    values = numbers(70_000)
    first = compressor.encode(values, None)
    assert all(compressor.encode(values.clone(), torch.empty(70_000)).equal(first) for _ in range(3))


def test_zeros_stay_zeros(compressor: Compressor) -> None:
    assert not compressor.decode(buffer_of(compressor.encode(torch.zeros(512), None)), 512).any()


def test_it_saves_bytes_and_does_not_grow_beyond_measure(compressor: Compressor) -> None:
    for length in (4096, 1 << 20):
        sent = compressor.encode(numbers(length), None).numel()
        assert 4 * length / MAX_EXPANSION <= sent <= 2 * length


def test_a_payload_of_another_length_is_refused(compressor: Compressor) -> None:
    payload = compressor.encode(numbers(4096), None)
    for wrong in (payload[:-64], payload[:0], torch.cat([payload, payload[-64:]]), payload[:-1]):
        with pytest.raises(ProtocolError):
            compressor.decode(buffer_of(wrong.clone()), 4096)
    for elements in (16, 1 << 30):
        with pytest.raises(ProtocolError):
            compressor.check(payload.numel(), elements)


def test_noise_is_refused_or_read_as_numbers(compressor: Compressor) -> None:
    """Whatever is sent, there are so many elements in the end, or an error of the protocol."""
    chance = random.Random(4)
    length = 512
    payload = compressor.encode(numbers(length), None)
    for _ in range(300):
        noise = bytearray(buffer_of(payload))
        for _ in range(chance.randint(1, 40)):
            noise[chance.randrange(len(noise))] = chance.randrange(256)
        try:
            found = compressor.decode(bytes(noise), length)
        except ProtocolError:
            continue
        assert found.shape == (length,)


def test_messages_name_it(compressor: Compressor) -> None:
    found = reader(compressor.encoding, FOR_PUSH)
    assert found is not None
    assert found.name == compressor.name
    with pytest.raises(ProtocolError, match=f"the encoding {compressor.name} has no place in this message"):
        reader(compressor.encoding, frozenset())


def test_an_unknown_number_is_refused() -> None:
    assert reader(0, frozenset()) is None
    with pytest.raises(ProtocolError, match="encoding number 77 is unknown"):
        reader(77, FOR_PUSH)
