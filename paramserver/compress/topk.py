"""The largest numbers of a chunk, by magnitude, and nothing of the others.

Payload: how many, as a uint32; their places in the chunk as int32, rising; their values as float32; zeros up to a
multiple of 64 bytes. Of equal magnitudes those at lower places come first.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from paramserver.compress.base import MAX_EXPANSION, padded, require_length
from paramserver.errors import NonFiniteError, ProtocolError
from paramserver.tensors.dtypes import tensor_from
from paramserver.tensors.finite import is_finite
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

_COUNT = struct.Struct("<I")
# The fewest numbers of a chunk that are sent, as a part of all.
MIN_RATIO = 0.001


class TopK:
    """``ratio``: which part of the numbers is sent; at least one of each chunk."""

    name = "topk"
    encoding = shard_pb2.ENCODING_TOPK
    feedback = True

    def __init__(self, ratio: float = 0.01) -> None:
        if not MIN_RATIO <= ratio <= 1:
            raise ValueError(f"the ratio of top-k must be from {MIN_RATIO} to 1, not {ratio}")
        self.ratio = ratio

    def encode(self, values: Tensor, decoded: Tensor | None) -> Tensor:
        if not is_finite(values):
            raise NonFiniteError("a gradient, with the rest of the previous contribution, is not finite")
        places = _largest(values.abs(), math.ceil(self.ratio * values.numel()))
        chosen = values[places]
        if decoded is not None:
            decoded.zero_()
            decoded[places] = chosen
        count = places.numel()
        payload = torch.zeros(padded(_COUNT.size + 8 * count), dtype=torch.uint8)
        payload[: _COUNT.size].view(torch.int32)[0] = count
        payload[4 : 4 + 4 * count].view(torch.int32).copy_(places)
        payload[4 + 4 * count : 4 + 8 * count].view(torch.float32).copy_(chosen)
        return payload

    def check(self, nbytes: int, elements: int) -> None:
        if not padded(_COUNT.size + 8) <= nbytes <= padded(_COUNT.size + 8 * elements):
            raise ProtocolError(f"top-k of {elements} elements cannot have {nbytes} bytes")
        if 4 * elements > MAX_EXPANSION * nbytes:
            raise ProtocolError(
                f"{nbytes} bytes of topk would become {4 * elements}, more than {MAX_EXPANSION} times as many"
            )

    def decode(self, payload: Buffer, elements: int) -> Tensor:
        flat = memoryview(payload)
        self.check(flat.nbytes, elements)
        (count,) = _COUNT.unpack_from(flat)
        if not 1 <= count <= elements:
            raise ProtocolError(f"top-k claims {count} of {elements} elements")
        require_length(self.name, flat.nbytes, padded(_COUNT.size + 8 * count), count)
        places = tensor_from(flat[4 : 4 + 4 * count], "int32").to(torch.int64)
        if int(places[0]) < 0 or int(places[-1]) >= elements or not bool((places[1:] > places[:-1]).all()):
            raise ProtocolError(f"the places of top-k must rise within the {elements} elements of their chunk")
        values = torch.zeros(elements, dtype=torch.float32)
        values[places] = tensor_from(flat[4 + 4 * count : 4 + 8 * count], "float32")
        return values


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """The places of the ``count`` largest, rising. torch does not say which of equal ones it takes; here the first."""
    found = torch.topk(magnitudes, count, sorted=False)
    least = found.values.amin()
    if int((magnitudes >= least).sum()) == count:  # there is no choice
        return found.indices.sort().values
    chosen = magnitudes > least
    missing = count - int(chosen.sum())
    chosen[(magnitudes == least).nonzero().view(-1)[:missing]] = True
    return chosen.nonzero().view(-1)
