"""Rounding to bfloat16 and float16, to the nearest, ties to even. What is beyond the largest number becomes that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paramserver.compress.base import require_length
from paramserver.tensors.dtypes import tensor_from
from paramserver.tensors.finite import is_finite
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer


class Cast:
    """Half the bytes. Leaves nothing for later: the error of one contribution has no sign that lasts."""

    feedback = False

    def __init__(self, name: str, encoding: shard_pb2.Encoding, dtype: torch.dtype) -> None:
        self.name, self.encoding, self.dtype = name, encoding, dtype
        self.type_name = str(dtype).removeprefix("torch.")
        self._limit = torch.finfo(dtype).max

    def encode(self, values: Tensor, decoded: Tensor | None) -> Tensor:
        rounded = values.to(self.dtype)
        if not is_finite(rounded):
            rounded = values.clamp(-self._limit, self._limit).to(self.dtype)
        if decoded is not None:
            decoded.copy_(rounded)
        return rounded.view(torch.uint8)

    def check(self, nbytes: int, elements: int) -> None:
        require_length(self.name, nbytes, 2 * elements, elements)

    def decode(self, payload: Buffer, elements: int) -> Tensor:
        self.check(memoryview(payload).nbytes, elements)
        return tensor_from(payload, self.type_name).to(torch.float32)


BF16 = Cast("bf16", shard_pb2.ENCODING_BF16, torch.bfloat16)
FP16 = Cast("fp16", shard_pb2.ENCODING_FP16, torch.float16)
