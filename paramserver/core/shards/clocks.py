"""The clocks of the workers at work. The slowest one is known at any time, without a look at all of them."""

from __future__ import annotations

from collections.abc import Mapping


class Clocks:
    """By worker, how many asynchronous slices it has finished."""

    def __init__(self, clocks: Mapping[int, int] | None = None) -> None:
        # The clock of each worker. Nobody else writes to it.
        self.of: dict[int, int] = dict(clocks or {})
        # How many workers there are at each clock.
        self._at: dict[int, int] = {}
        for clock in self.of.values():
            self._at[clock] = self._at.get(clock, 0) + 1
        # None: no worker is at work.
        self.slowest: int | None = min(self._at, default=None)

    def raise_to(self, worker: int, clock: int) -> None:
        """The worker has finished at least so many slices. A worker that was not at work is from now on."""
        was = self.of.get(worker)
        if was is not None and was >= clock:
            return
        self.of[worker] = clock
        self._at[clock] = self._at.get(clock, 0) + 1
        if self.slowest is None or clock < self.slowest:
            self.slowest = clock
        if was is not None:
            self._left(was)

    def drop(self, worker: int) -> None:
        """The worker is not at work any more."""
        was = self.of.pop(worker, None)
        if was is not None:
            self._left(was)

    def _left(self, clock: int) -> None:
        """One worker less is at this clock."""
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
            if clock == self.slowest:
                self.slowest = min(self._at, default=None)
