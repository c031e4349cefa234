"""Holds the workers of a job until the test lets them go on."""

from __future__ import annotations

import threading

from paramserver.worker.context import Context


class Pacer:
    """Lets the workers of a job go on until they have begun a number of slices, all together."""

    def __init__(self) -> None:
        self.begun = 0
        self._limit = 0
        self._changed = threading.Condition()

    def __call__(self, ctx: Context, slices: int) -> None:
        with self._changed:
            self.begun += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.begun <= self._limit, 60.0), "nobody let this worker go on"

    def go(self, more: int) -> None:
        """Let them begin so many more slices, and wait until they have."""
        with self._changed:
            target = self._limit = self.begun + more
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.begun >= target, 60.0), "the workers are stuck"

    def free(self) -> None:
        """Let them go on to the end."""
        with self._changed:
            self._limit = 1_000_000_000
            self._changed.notify_all()
