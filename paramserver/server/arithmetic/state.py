"""The optimizer state of chunks that are updated together, whatever the optimizer looks at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from paramserver.core.layout.hypers import Hypers
from paramserver.core.layout.plan import Chunk

if TYPE_CHECKING:
    from torch import Tensor

    from paramserver.server.arithmetic.combine import Sum

# (tensor, key, first element in the tensor, data, one number for the whole tensor)
StateEntry = tuple[int, str, int, "Tensor", bool]


class State(Protocol):
    """One chunk, or one tensor of several chunks: then ``chunk`` is all of them, joined."""

    chunk: Chunk

    def step(
        self, weights: Tensor, gradient: Tensor | Sum, used: Collection[int], hypers: Hypers, out: Tensor | None = None
    ) -> Tensor:
        """The next weights, in new memory or in ``out``; updates the state. See `ChunkState.step`."""

    def fresh(self) -> State:
        """The state of the same chunk before its first update."""

    def fork(self) -> State:
        """A copy, with memory of its own."""

    def export(self) -> Iterator[StateEntry]:
        """The state by tensor and key, in this order. The data are views of the live state."""

    def load(self, entries: Iterable[StateEntry]) -> None:
        """Replaces the state by copies of entries of `export`. Raises ModelError if they are not complete."""

    def check(self, hypers: Hypers) -> None:
        """Raises ModelError if these hyper-parameters ask for other state than there is."""
