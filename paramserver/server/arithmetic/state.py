"""The optimizer state of chunks that are updated together, whatever the optimizer looks at."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
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


class StateCopy:
    """The optimizer state of one version, by chunk. The first user of a chunk copies its state; it is used once."""

    def __init__(self, states: Mapping[int, State], lock: threading.Lock) -> None:
        self._states, self._lock = states, lock
        self._copies: dict[int, list[StateEntry]] = {}
        self._used: set[int] = set()

    def keep(self, index: int) -> None:
        """See to it that :meth:`use` gives the state of a chunk as it is, whatever happens to it afterwards."""
        with self._lock:
            if index not in self._copies and index not in self._used:
                self._copies[index] = self._copy(index)

    def outline(self, index: int) -> list[StateEntry]:
        """The entries that :meth:`use` will return, without their numbers, which may be changing."""
        with self._lock:
            return self._copies[index] if index in self._copies else list(self._states[index].export())

    def use(self, index: int) -> list[StateEntry]:
        """The state of a chunk as it was; it is not kept any longer."""
        with self._lock:
            self._used.add(index)
            return self._copies.pop(index) if index in self._copies else self._copy(index)

    def forget(self) -> None:
        """The states that have not been used will not be used."""
        with self._lock:
            self._used.update(self._states)
            self._copies.clear()

    def _copy(self, index: int) -> list[StateEntry]:
        return [(*e[:3], e[3].clone(), e[4]) for e in self._states[index].export()]
