"""Weights of a version that are still on their way while the script computes with the weights already received.

Two threads take part. The loop adds chunks that arrive (`Rest`). The script's thread puts a chunk in its place when it
needs the chunk (`IncomingWeights`). Until then the place holds older weights, so weights change only in that thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.worker.flat import FlatSpace
from paramserver.worker.weights.pulled import Pulled
from paramserver.worker.weights.rest import Rest


class IncomingWeights:
    """One version, part of which is still to come into ``space``. Belongs to the script's thread.

    Notes which tensors were read, through :meth:`read`. A computation with a tensor that was not read has used an older
    version. Errors are raised by :meth:`settle`, and not in the middle of a forward pass. The caller then drops the
    result of that pass.
    """

    def __init__(
        self,
        space: FlatSpace,
        results: Sequence[Pulled],
        rounding: Cast | None,
        goes_on: Callable[[], None],
        waits: Callable[[str], None],
    ) -> None:
        """``goes_on`` raises if waiting is of no use; ``waits`` gets the server waited for, and "" afterwards."""
        self._space, self._rounding, self._goes_on, self._waits = space, rounding, goes_on, waits
        self._rests = [result.rest for result in results if result.rest is not None]
        self._left: dict[int, Rest] = {chunk: rest for rest in self._rests for chunk in rest.left}
        # By tensor, its chunks that are still to come; and the tensors that were not read since the beginning.
        self._chunks_of: dict[int, list[int]] = {}
        for chunk in self._left:
            for piece in space.layout.chunks[chunk].pieces:
                self._chunks_of.setdefault(piece.tensor, []).append(chunk)
        self._unread = set(self._chunks_of)
        self._error: BaseException | None = None
        # Seconds that the script has waited.
        self.waited_s = 0.0

    def unread(self, tensors: Collection[int]) -> frozenset[int]:
        """The tensors among ``tensors`` that were still to come at the beginning and were not read since."""
        return frozenset(self._unread.intersection(tensors))

    def read(self, tensor: int) -> None:
        """A tensor is about to be read or written: wait for its chunks."""
        self._unread.discard(tensor)
        for chunk in self._chunks_of.pop(tensor, ()):
            self._take(chunk)

    def read_all(self) -> None:
        """All tensors are about to be read."""
        for tensor in list(self._unread):
            self.read(tensor)

    def complete(self) -> None:
        """Put all chunks in their places; their tensors do not count as read."""
        for chunk in list(self._left):
            self._take(chunk)

    def settle(self) -> None:
        """Put the remaining chunks in their places. Raises the error that has kept a chunk from coming."""
        self.complete()
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """The rest of the version is no longer wanted."""
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
                self._waits(f"weights of {rest.server}")
            data = rest.take(chunk, self._goes_on)
        except errors.ParamServerError as error:
            self._error = error
            return
        finally:
            if began is not None:
                self.waited_s += time.monotonic() - began
                self._waits("")
        self._space.write({chunk: data}, self._rounding)
