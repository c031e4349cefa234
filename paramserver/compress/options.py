"""The options of a job, by name. Needs neither torch nor messages, so that settings can check against it."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.core.layout.plan import Chunk, Kind

PULL_PRECISIONS = ("fp32", "bf16", "fp16")
PUSH_COMPRESSIONS = ("none", "bf16", "fp16", "int8", "topk")


@dataclass(frozen=True, slots=True)
class Wire:
    """In which form gradients travel.

    ``push``: one of PUSH_COMPRESSIONS. ``topk_ratio``: see `compress.topk`. ``flush_every``: at versions that are
    multiples of it nothing is kept back.
    """

    push: str = "none"
    topk_ratio: float = 0.01
    flush_every: int = 100


def compressible(chunk: Chunk) -> bool:
    """Whether a chunk is ever sent in another form: float32 numbers that are trained. Buffers and float64 are exact."""
    return chunk.kind is Kind.PARAMETER and chunk.dtype == "float32"
