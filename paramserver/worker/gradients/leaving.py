"""The chunks of a contribution that leaves while it is computed: one thread fills them, another thread reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from paramserver.core.layout.plan import Plan


class EarlyChunks:
    """The chunks of one contribution, as they become ready. The script's thread fills them in, the loop reads them."""

    def __init__(self, plan: Plan, used: Iterable[int], loop: asyncio.AbstractEventLoop) -> None:
        """``used``: the tensors of which the contribution is expected to have gradients or changes."""
        self._loop = loop
        wanted = frozenset(used)
        # By chunk, how many of its tensors are missing; by tensor, the chunks that hold parts of it.
        self._lacking: dict[int, int] = {}
        self._chunks_of: dict[int, list[int]] = {tensor: [] for tensor in wanted}
        for chunk in plan.layout.chunks:
            here = {piece.tensor for piece in chunk.pieces} & wanted
            if here:
                self._lacking[chunk.index] = len(here)
            for tensor in here:
                self._chunks_of[tensor].append(chunk.index)
        # In the loop: the chunks that are ready, in their order; and whether the gradients are known to be final.
        self._ready: list[int] = []
        self._sealed = asyncio.Event()
        self._changed = asyncio.Event()

    def ready(self, tensor: int) -> None:
        """A tensor is in its place. A second call for the same tensor changes nothing."""
        for chunk in self._chunks_of.pop(tensor, ()):
            self._lacking[chunk] -= 1
            if not self._lacking[chunk]:
                self._loop.call_soon_threadsafe(self._add, [chunk], False)

    def seal(self) -> None:
        """All tensors are in their places, and the gradients that were sent are final."""
        rest = [chunk for chunk, lacking in self._lacking.items() if lacking]
        self._loop.call_soon_threadsafe(self._add, rest, True)

    def _add(self, chunks: list[int], sealed: bool) -> None:
        self._ready += chunks
        if sealed:
            self._sealed.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def of(self, mine: frozenset[int]) -> AsyncIterator[int]:
        """The chunks of ``mine``, each as soon as it is ready. Ends when no further chunk will be ready early."""
        at = 0
        while True:
            changed = self._changed
            while at < len(self._ready):
                at += 1
                if self._ready[at - 1] in mine:
                    yield self._ready[at - 1]
            if self._sealed.is_set() and at == len(self._ready):
                return
            if not self._sealed.is_set():
                await changed.wait()

    async def whole(self) -> None:
        """Wait for :meth:`seal`."""
        await self._sealed.wait()
