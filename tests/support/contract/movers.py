"""A device that is as late as it may be, for tests on the CPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paramserver.worker.device import PlainMover, Ticket


class _Late:
    """Copies when it is waited for; notices if what it reads has been changed by then."""

    def __init__(self, mover: LateMover, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._mover, self._pairs = mover, list(zip(sources, targets, strict=True))
        self._seen = [source.clone() for source in sources]
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self._mover.waited += bool(self._pairs)
            for (source, target), seen in zip(self._pairs, self._seen, strict=True):
                if not torch.equal(source, seen):
                    self._mover.mistakes.append("what a copy reads was changed before it was done")
                target.copy_(seen)
            self._pairs, self._seen = [], []


class LateMover(PlainMover):
    """Until a ticket has been waited for, what is fetched is NaN in main memory. ``mistakes``: by those who did not.

    ``waited``: how many of the copies were waited for.
    """

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.fetched = self.brought = self.waited = 0

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        self.fetched += 1
        for target in targets:
            target.fill_(math.nan)
        return _Late(self, sources, targets)

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """What is computed next finds it; what is read must stay all the same."""
        self.brought += 1
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        kept = [source.clone() for source in sources]
        return _Late(self, sources, kept)


def imagine(monkeypatch: pytest.MonkeyPatch) -> list[LateMover]:
    """From now on the model of each worker is on such a device. Returns the movers, added as workers begin."""
    movers: list[LateMover] = []

    def imagined(_: object) -> LateMover:
        movers.append(LateMover())
        return movers[-1]

    monkeypatch.setattr("paramserver.worker.memory.places.mover_for", imagined)
    return movers
