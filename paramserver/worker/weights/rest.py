"""The part of one shard's answer that is still to come when its version is known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

from paramserver import errors
from paramserver.core.layout.thresholds import REST_BYTES

# If less than this is still to come from a server, it is waited for at once.
LEAST_BYTES = REST_BYTES
# A waiting thread checks at this interval, in seconds, whether the job goes on.
_LOOK_S = 0.1


class Rest:
    """The chunks of one shard's answer that had not come when its version was known."""

    def __init__(self, server: str, left: Iterable[int]) -> None:
        self.server = server
        self.left = frozenset(left)
        self._chunks: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._task: asyncio.Task[Any] | None = None
        self._over = False
        self._error: BaseException | None = None

    def comes_by(self, task: asyncio.Task[Any]) -> None:
        """The task of the loop that receives the chunks."""
        self._task = task
        task.add_done_callback(self._ended)

    def came(self, chunk: int, data: memoryview) -> None:
        """In the loop: a chunk has come. The same chunk may come again after an interruption."""
        with self._changed:
            self._chunks[chunk] = data
            self._changed.notify_all()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        with self._changed:
            self._over = True
            if not task.cancelled():
                self._error = task.exception()
            self._changed.notify_all()

    def cancel(self) -> None:
        """The chunks are no longer wanted. From any thread."""
        task = self._task
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)

    def has(self, chunk: int) -> bool:
        """Whether a chunk is here."""
        return chunk in self._chunks

    def take(self, chunk: int, goes_on: Callable[[], None]) -> memoryview:
        """Wait for a chunk; raises the error of the pull, or the error that ``goes_on`` raises meanwhile."""
        with self._changed:
            while chunk not in self._chunks:
                if self._over:
                    raise self._error or errors.RolledBackError("the pull was given up")
                self._changed.wait(_LOOK_S)
                goes_on()
            return self._chunks.pop(chunk)
