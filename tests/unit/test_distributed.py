"""How collectives are cut and numbered, and the arithmetic of servers."""

from __future__ import annotations

import itertools

import pytest
import torch

from paramserver.distributed.rounds import PIECE_BYTES, Exchange, Numbers, pieces, server_of
from paramserver.errors import ProtocolError
from paramserver.server.collectives.reducing import check_reduction, reduce
from paramserver.v1 import shard_pb2 as pb


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 2**16, 2**16 + 1, 10 * 2**20 + 3])
def test_pieces_cover_all_bytes_once(nbytes: int, servers: int) -> None:
    cut = list(pieces(nbytes, servers))
    assert cut[0][0] == 0
    assert cut[-1][1] == nbytes
    assert all(before[1] == after[0] and before[1] % 64 == 0 for before, after in itertools.pairwise(cut))
    assert max(stop - start for start, stop in cut) <= PIECE_BYTES


def test_all_servers_have_work() -> None:
    exchange = Exchange("", "", 7, 4 * 2**20)
    cut = list(pieces(exchange.nbytes, 3))
    assert {server_of(exchange, piece, 3) for piece in range(len(cut))} == {0, 1, 2}


def test_a_number_is_over_when_all_before_it_are() -> None:
    numbers = Numbers()
    assert [numbers.take(""), numbers.take(""), numbers.take("pair")] == [0, 1, 0]
    numbers.over("", 1)
    assert (numbers.done(""), numbers.done("pair"), numbers.done("other")) == (0, 0, 0)
    numbers.over("", 0)
    assert numbers.done("") == 2


def test_the_order_of_the_contributions_alone_decides_the_bits() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(1000) * 10**scale for scale in range(-4, 4)]
    expected = torch.zeros(1000)
    for part in parts:
        expected = expected + part
    assert torch.equal(reduce(pb.REDUCTION_SUM, parts), expected)
    assert torch.equal(reduce(pb.REDUCTION_AVG, parts), expected / 8)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (pb.REDUCTION_SUM, [9, 3]),
        (pb.REDUCTION_MIN, [3, 1]),
        (pb.REDUCTION_MAX, [6, 2]),
        (pb.REDUCTION_PRODUCT, [18, 2]),
        (pb.REDUCTION_BAND, [2, 0]),
        (pb.REDUCTION_BOR, [7, 3]),
        (pb.REDUCTION_BXOR, [5, 3]),
        (pb.REDUCTION_AVG, [4, 1]),
    ],
)
def test_reductions_of_whole_numbers(reduction: int, expected: list[int]) -> None:
    parts = [torch.tensor([3, 1]), torch.tensor([6, 2])]
    assert reduce(reduction, parts).tolist() == expected
    assert parts[0].tolist() == [3, 1], "contributions stay as they are"


def test_an_average_of_whole_numbers_drops_its_fraction() -> None:
    """As with NCCL, and with gloo where Lightning divides: towards zero. Lightning takes it for numbers of samples."""
    parts = [torch.tensor([7, -7, 2**62]), torch.tensor([0, 0, 2**61]), torch.tensor([4, -4, 2])]
    assert reduce(pb.REDUCTION_AVG, parts).tolist() == [3, -3, (2**62 + 2**61 + 2) // 3]
    check_reduction(pb.REDUCTION_AVG, torch.int64)


def test_half_precision_is_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 0.5, 0.5, 0.5, 0.5)]
    assert reduce(pb.REDUCTION_SUM, parts).tolist() == [258.0]
    assert reduce(pb.REDUCTION_SUM, parts).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("reduction", "dtype"), [(pb.REDUCTION_AVG, torch.bool), (pb.REDUCTION_BOR, torch.float32), (99, torch.float32)]
)
def test_what_cannot_be_reduced_is_refused(reduction: int, dtype: torch.dtype) -> None:
    with pytest.raises(ProtocolError, match=r"not possible|unknown"):
        check_reduction(reduction, dtype)
