"""A server's own arithmetic without its messages. `benchmarks.apply` and `benchmarks.agg` compare it with others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import Chunk, TensorSpec, make_layout, make_plan
from paramserver.core.versions.names import SyncName
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.optimizers import describe

# The least traffic of each setting for a weight: bytes read and written, without the gradients (docs/performance.md).
STATE_BYTES = {"SGD": 8, "momentum": 16, "AdamW": 24}
_TRIAD_BYTES = 12


def optimizer_of(name: str, parameters: Sequence[Tensor], **how: Any) -> torch.optim.Optimizer:
    """One of ``STATE_BYTES``. ``how``: the way in which torch carries it out."""
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-3, **how)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if name == "momentum" else 0.0, **how)


@dataclass(slots=True)
class Shard:
    """All of a model of ``elements`` weights, each 1 at first, on one server. Versions take turns in two slots."""

    tensors: ShardTensors
    version: Version
    slots: list[dict[int, Tensor]]
    contributions: list[Contribution]

    @staticmethod
    def of(optimizer: str, gradients: Sequence[Tensor]) -> Shard:
        """A step has one slice of one sample for each of the flat ``gradients``, of a multiple of 16 elements."""
        elements, count = gradients[0].numel(), len(gradients)
        layout = make_layout([TensorSpec("weights", (elements,), "float32")])
        chunks = make_plan(layout, 1).chunks_of(0)
        name, (group,) = describe(optimizer_of(optimizer, [torch.zeros(1)]))
        used = frozenset((0,))
        contributions = [
            Contribution(
                name=SyncName(0, slice_, slice_ + 1, count),
                worker=slice_,
                samples=1,
                overflow=False,
                base_version=0,
                used=used,
                groups=(group,),
                chunks={chunk.index: gradient[chunk.start : chunk.start + chunk.elements] for chunk in chunks},
            )
            for slice_, gradient in enumerate(gradients)
        ]
        slots = [{chunk.index: torch.ones(chunk.elements) for chunk in chunks} for _ in range(2)]
        return Shard(
            ShardTensors(layout, chunks, Optimizers((name,))), Version(0, chunks, slots[0]), slots, contributions
        )

    def step(self) -> None:
        """The next version."""
        slot = self.slots[(self.version.number + 1) % 2]

        def space(chunk: Chunk) -> Tensor:
            return slot[chunk.index]

        self.version = self.tensors.build(self.version, self.contributions, None, space)

    def weights(self) -> Tensor:
        """A copy of all weights."""
        return torch.cat([self.version.tensors[index] for index in sorted(self.version.tensors)])


class Triad:
    """``b += x * c`` in memory, whose speed all bounds are taken from."""

    def __init__(self, elements: int) -> None:
        self._b, self._c = torch.ones(elements), torch.ones(elements)
        self.seconds: list[float] = []

    def step(self) -> None:
        """Measure once."""
        began = time.monotonic()
        self._b.add_(self._c, alpha=0.5)
        self.seconds.append(time.monotonic() - began)

    def bound(self, bytes_per_element: float) -> list[float]:
        """Seconds in which so many bytes would have moved for each of the elements, each time it was measured."""
        return [seconds * bytes_per_element / _TRIAD_BYTES for seconds in self.seconds]
