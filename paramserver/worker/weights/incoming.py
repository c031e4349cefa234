"""Weights of a version that are still on their way while the script computes with the ones already received.

Two threads: the loop adds what arrives (`Rest`), the script's thread puts it in its place when it needs it
(`IncomingWeights`). Until then the place holds what it held before, so nothing changes under the script's hands.
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
        """The tensors among ``tensors`` that were still to come at the beginning and that have not been read since."""
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
