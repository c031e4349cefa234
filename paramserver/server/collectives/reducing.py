"""The arithmetic of a round. The order of the contributions alone decides the bits of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paramserver.errors import ProtocolError
from paramserver.v1 import shard_pb2

_INTO: dict[int, Callable[[torch.Tensor, torch.Tensor], object]] = {
    shard_pb2.REDUCTION_SUM: torch.Tensor.add_,
    shard_pb2.REDUCTION_AVG: torch.Tensor.add_,
    shard_pb2.REDUCTION_MIN: lambda total, one: torch.minimum(total, one, out=total),
    shard_pb2.REDUCTION_MAX: lambda total, one: torch.maximum(total, one, out=total),
    shard_pb2.REDUCTION_PRODUCT: torch.Tensor.mul_,
    shard_pb2.REDUCTION_BAND: torch.Tensor.bitwise_and_,
    shard_pb2.REDUCTION_BOR: torch.Tensor.bitwise_or_,
    shard_pb2.REDUCTION_BXOR: torch.Tensor.bitwise_xor_,
}
_BITS = (shard_pb2.REDUCTION_BAND, shard_pb2.REDUCTION_BOR, shard_pb2.REDUCTION_BXOR)
_HALVES = (torch.float16, torch.bfloat16)


def check_reduction(reduction: int, dtype: torch.dtype) -> None:
    """Raise ProtocolError if numbers of this type cannot be reduced so."""
    if reduction not in _INTO:
        raise ProtocolError(f"reduction {reduction} is unknown")
    whole = not dtype.is_floating_point
    if (reduction in _BITS and not whole) or (reduction == shard_pb2.REDUCTION_AVG and whole):
        name = shard_pb2.Reduction.Name(reduction).removeprefix("REDUCTION_").lower()
        raise ProtocolError(f"{name} of {str(dtype).removeprefix('torch.')} is not possible")


def reduce(reduction: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of flat tensors of one size and type, one after the other; they stay as they are.

    16-bit floats are reduced as float32 and rounded once.
    """
    first = parts[0]
    wide = first.dtype in _HALVES
    total = first.float() if wide else first.clone()
    for part in parts[1:]:
        _INTO[reduction](total, part.float() if wide else part)
    if reduction == shard_pb2.REDUCTION_AVG:
        total /= len(parts)
    return total.to(first.dtype)
