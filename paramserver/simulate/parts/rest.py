"""The missing pieces of a version when a simulated worker goes on, as in `worker.weights.rest`."""

from __future__ import annotations

from collections.abc import Mapping

from paramserver.simulate.machinery.blame import Chain
from paramserver.simulate.machinery.clock import Signal


class Rest:
    """Pieces of one server. ``needed``: by piece, from which part of the forward pass on, 0 to 1."""

    def __init__(self, needed: Mapping[int, float]) -> None:
        self._left = dict(needed)
        self._part = 0.0
        self._waits: Signal[Chain] | None = None

    def came(self, piece: int, chain: Chain) -> None:
        """A piece is here."""
        self._left.pop(piece, None)
        if self._waits is not None and not self._lacks():
            waits, self._waits = self._waits, None
            waits.set(chain)

    @property
    def complete(self) -> bool:
        """Whether all pieces are here."""
        return not self._left

    def all(self, chain: Chain) -> None:
        """All pieces have come: another server of the shard has sent them."""
        for piece in list(self._left):
            self.came(piece, chain)

    def until(self, part: float) -> Signal[Chain] | None:
        """A signal that all pieces for this part of the forward pass have come; None: they have come already."""
        self._part = part
        if not self._lacks():
            return None
        self._waits = Signal()
        return self._waits

    def _lacks(self) -> bool:
        return any(needed < self._part for needed in self._left.values())
