"""How long this process has collected garbage."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping


class Garbage:
    """Hears of all collections of the process from :meth:`begin` on. One collection runs at a time."""

    def __init__(self) -> None:
        # In all, so far.
        self.seconds = 0.0
        self._begun = 0.0

    def begin(self) -> None:
        """Count from now on. A second call does nothing."""
        if self._collects not in gc.callbacks:
            gc.callbacks.append(self._collects)

    def _collects(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._begun


# The interpreter has one collector.
GARBAGE = Garbage()
