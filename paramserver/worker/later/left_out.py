"""Frozen parameters that servers know nothing of: ``ctx.prepare(..., only_trained=True)``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paramserver import errors
from paramserver.tensors.dtypes import buffer_of

# A number that travels as float64 has so many bits.
_BITS = 52
_NAME = "frozen parameters"


class _Agreeing(Protocol):
    def agree(self, name: str, place: tuple[int, int], value: float) -> float:
        """Give a number for this place of the script; returns the number that all workers have there."""


def compare(agreeing: _Agreeing, frozen: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ModelError if the first worker of the job has brought other frozen parameters than these."""
    mine = float(_number(frozen))
    if agreeing.agree(_NAME, (1, 1), mine) != mine:
        raise errors.ModelError(
            "this worker's frozen parameters are not those of the first worker, and with only_trained they do not "
            "travel: load or seed the same base model in every worker before ctx.prepare"
        )


def _number(frozen: Sequence[tuple[str, Tensor]]) -> int:
    """A digest of names, types, shapes and values, as a whole number that float64 keeps."""
    digest = hashlib.sha256()
    for name, tensor in frozen:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(buffer_of(tensor.detach().to("cpu").contiguous()))
    return int.from_bytes(digest.digest()[:8], "big") >> (64 - _BITS)
