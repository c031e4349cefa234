"""The arithmetic of a round. The order of the contributions alone decides the bits of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paramserver.errors import ProtocolError
from paramserver.v1 import shard_pb2

# Each takes two tensors, and `out`.
_OF_TWO: dict[int, Callable[..., torch.Tensor]] = {
    shard_pb2.REDUCTION_SUM: torch.add,
    shard_pb2.REDUCTION_AVG: torch.add,
    shard_pb2.REDUCTION_MIN: torch.minimum,
    shard_pb2.REDUCTION_MAX: torch.maximum,
    shard_pb2.REDUCTION_PRODUCT: torch.mul,
    shard_pb2.REDUCTION_BAND: torch.bitwise_and,
    shard_pb2.REDUCTION_BOR: torch.bitwise_or,
    shard_pb2.REDUCTION_BXOR: torch.bitwise_xor,
}
_BITS = (shard_pb2.REDUCTION_BAND, shard_pb2.REDUCTION_BOR, shard_pb2.REDUCTION_BXOR)
_HALVES = (torch.float16, torch.bfloat16)


def check_reduction(reduction: int, dtype: torch.dtype) -> None:
    """Raise ProtocolError if numbers of this type cannot be reduced so."""
    if reduction not in _OF_TWO:
        raise ProtocolError(f"reduction {reduction} is unknown")
    whole = not dtype.is_floating_point
    if (reduction in _BITS and not whole) or (reduction == shard_pb2.REDUCTION_AVG and dtype is torch.bool):
        name = shard_pb2.Reduction.Name(reduction).removeprefix("REDUCTION_").lower()
        raise ProtocolError(f"{name} of {str(dtype).removeprefix('torch.')} is not possible")


def reduce(reduction: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of flat tensors of one size and type, one after the other; they stay as they are.

    16-bit floats are reduced as float32 and rounded once. An average of whole numbers drops its fraction: NCCL divides
    so, and gloo's users (Lightning, for numbers of samples) divide the sum so.
    """
    of_two, dtype = _OF_TWO[reduction], parts[0].dtype
    wide = [part.float() for part in parts] if dtype in _HALVES else parts
    total = of_two(wide[0], wide[1]) if len(wide) > 1 else wide[0].clone()
    for part in wide[2:]:
        of_two(total, part, out=total)
    if reduction == shard_pb2.REDUCTION_AVG:
        total.div_(len(parts), rounding_mode=None if total.is_floating_point() else "trunc")
    return total.to(dtype)
