"""Weights of a version that are still on their way while the script computes with the ones already received.

Two threads: the loop adds what arrives (`Rest`), the script's thread puts it in its place when it needs it
(`IncomingWeights`). Until then the place holds what it held before, so nothing changes under the script's hands.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from paramserver import errors

if TYPE_CHECKING:
    from paramserver.compress.casts import Cast
    from paramserver.worker.flat import FlatSpace
    from paramserver.worker.weights.pulled import Pulled

# If less than this is still to come from a server, it is waited for at once.
LEAST_BYTES = 1 << 20
# How often whoever waits looks whether the job goes on.
_LOOK_S = 0.1


class Rest:
    """The chunks of one shard's answer that had not come when its version was known."""

    def __init__(self, server: int, left: Iterable[int]) -> None:
        self.server = server
        self.left = frozenset(left)
        self._chunks: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._task: asyncio.Task[Pulled] | None = None
        self._over = False
        self._error: BaseException | None = None

    def comes_by(self, task: asyncio.Task[Pulled]) -> None:
        """What brings it, in the loop."""
        self._task = task
        task.add_done_callback(self._ended)

    def came(self, chunk: int, data: memoryview) -> None:
        """In the loop: a chunk is here. The same one may come again, after an interruption."""
        with self._changed:
            self._chunks[chunk] = data
            self._changed.notify_all()

    def _ended(self, task: asyncio.Task[Pulled]) -> None:
        with self._changed:
            self._over = True
            if not task.cancelled():
                self._error = task.exception()
            self._changed.notify_all()

    def cancel(self) -> None:
        """From any thread: nobody wants it any more."""
        task = self._task
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)

    def has(self, chunk: int) -> bool:
        """Whether a chunk is here."""
        return chunk in self._chunks

    def take(self, chunk: int, goes_on: Callable[[], None]) -> memoryview:
        """A chunk, waiting for it; raises what the pull has failed with, or what ``goes_on`` raises meanwhile."""
        with self._changed:
            while chunk not in self._chunks:
                if self._over:
                    raise self._error or errors.RolledBackError("the pull was given up")
                self._changed.wait(_LOOK_S)
                goes_on()
            return self._chunks.pop(chunk)


class IncomingWeights:
    """One version, part of which is still to come into ``space``. Belongs to the script's thread.

    Takes note of which tensors were read, through :meth:`read`; whoever has computed with one that was not has computed
    with another version of it. If something fails, that is raised by :meth:`settle`, and not in the middle of a forward
    pass: what that computes is then worth nothing, and nobody is to get it.
    """

    def __init__(
        self,
        space: FlatSpace,
        results: Sequence[Pulled],
        rounding: Cast | None,
        goes_on: Callable[[], None],
        waits: Callable[[str], None],
    ) -> None:
        """``goes_on`` raises if it is no use to wait; ``waits`` hears for whom this thread waits, "" afterwards."""
        self._space, self._rounding, self._goes_on, self._waits = space, rounding, goes_on, waits
        self._rests = [result.rest for result in results if result.rest is not None]
        self._left: dict[int, Rest] = {chunk: rest for rest in self._rests for chunk in rest.left}
        # By tensor, its chunks that are still to come; and the tensors of which nobody has asked for all.
        self._chunks_of: dict[int, list[int]] = {}
        for chunk in self._left:
            for piece in space.layout.chunks[chunk].pieces:
                self._chunks_of.setdefault(piece.tensor, []).append(chunk)
        self._unread = set(self._chunks_of)
        self._error: BaseException | None = None
        # How long the script has waited.
        self.waited_s = 0.0

    def unread(self, tensors: Collection[int]) -> frozenset[int]:
        """Those of these tensors that were not here when it began, and that nobody has said to have read."""
        return frozenset(self._unread.intersection(tensors))

    def read(self, tensor: int) -> None:
        """A tensor is about to be read, or written: see to it that it is there."""
        self._unread.discard(tensor)
        for chunk in self._chunks_of.pop(tensor, ()):
            self._take(chunk)

    def read_all(self) -> None:
        """All tensors are about to be read."""
        for tensor in list(self._unread):
            self.read(tensor)

    def complete(self) -> None:
        """Put all in its place; that it is read has to be said all the same."""
        for chunk in list(self._left):
            self._take(chunk)

    def settle(self) -> None:
        """Put the rest in its place. Raises what has kept something from coming."""
        self.complete()
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """It is no longer wanted."""
        for rest in self._rests:
            rest.cancel()
        self._left.clear()
        self._chunks_of.clear()

    def _take(self, chunk: int) -> None:
        rest = self._left.pop(chunk, None)
        if rest is None or self._error is not None:
            return
        began = None if rest.has(chunk) else time.monotonic()
        try:
            if began is not None:
                self._waits(f"weights of server-{rest.server}")
            data = rest.take(chunk, self._goes_on)
        except errors.ParamServerError as error:
            self._error = error
            return
        finally:
            if began is not None:
                self.waited_s += time.monotonic() - began
                self._waits("")
        self._space.write({chunk: data}, self._rounding)
