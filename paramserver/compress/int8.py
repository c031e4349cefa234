"""Eight bits per number, with one scale for every 256 of them.

Payload: a float32 scale per block, then an int8 per element, then zeros up to a multiple of 64 bytes. A number is its
int8 times the scale of its block, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paramserver.compress.base import padded, require_length
from paramserver.errors import NonFiniteError, ProtocolError
from paramserver.tensors.dtypes import tensor_from
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

BLOCK = 256
_LEVELS = 127
# Within these limits 127 times a scale is finite, and a number divided by its scale is, too.
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max / 128
# Elements at a time, which are passed over several times and should stay in cache.
_TILE = 256 * BLOCK


class Int8:
    """A quarter of the bytes; the error of a number is at most half a level, 1/254 of the largest in its block."""

    name = "int8"
    encoding = shard_pb2.ENCODING_INT8
    feedback = True

    def encode(self, values: Tensor, decoded: Tensor | None) -> Tensor:
        elements = values.numel()
        blocks = -(-elements // BLOCK)
        payload = torch.empty(padded(4 * blocks + elements), dtype=torch.uint8)
        payload[4 * blocks + elements :] = 0
        scales = payload[: 4 * blocks].view(torch.float32)
        levels = payload[4 * blocks : 4 * blocks + elements].view(torch.int8)
        for start in range(0, elements, _TILE):
            stop = min(start + _TILE, elements)
            whole = start + (stop - start) // BLOCK * BLOCK
            for lo, hi, width in ((start, whole, BLOCK), (whole, stop, stop - whole)):
                if lo < hi:
                    out = None if decoded is None else decoded[lo:hi].view(-1, width)
                    scale = scales[lo // BLOCK : -(-hi // BLOCK)]
                    _encode(values[lo:hi].view(-1, width), scale, levels[lo:hi].view(-1, width), out)
        return payload

    def check(self, nbytes: int, elements: int) -> None:
        require_length(self.name, nbytes, padded(4 * -(-elements // BLOCK) + elements), elements)

    def decode(self, payload: Buffer, elements: int) -> Tensor:
        flat = memoryview(payload)
        self.check(flat.nbytes, elements)
        blocks = -(-elements // BLOCK)
        scales = tensor_from(flat[: 4 * blocks], "float32")
        least, most = scales.aminmax()
        if not (float(least) >= _SMALLEST and float(most) <= _LARGEST):
            raise ProtocolError(
                f"a scale of int8 is zero, negative, not finite or beyond {_LARGEST:g}: the smallest is "
                f"{float(least):g}, the largest {float(most):g}"
            )
        levels = tensor_from(flat[4 * blocks : 4 * blocks + elements], "int8")
        values = levels.to(torch.float32)
        whole = elements // BLOCK * BLOCK
        values[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK].unsqueeze(1))
        if whole < elements:
            values[whole:].mul_(scales[-1])
        return values


def _encode(values: Tensor, scales: Tensor, levels: Tensor, decoded: Tensor | None) -> None:
    """One row per block."""
    largest = torch.maximum(values.amax(1), values.amin(1).neg_())
    if not bool(largest.isfinite().all()):
        raise NonFiniteError("a gradient, with the rest of the previous contribution, is not finite")
    torch.clamp(largest.div_(_LEVELS), _SMALLEST, _LARGEST, out=scales)
    level = values / scales.unsqueeze(1)
    level.round_().clamp_(-_LEVELS, _LEVELS)
    levels.copy_(level)
    if decoded is not None:
        # From the levels that are sent, which have no negative zero.
        decoded.copy_(levels).mul_(scales.unsqueeze(1))
