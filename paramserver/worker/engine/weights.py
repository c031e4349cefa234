"""How versions come to where the script has its model."""

from __future__ import annotations

from paramserver.failpoints import reach
from paramserver.worker.engine.host import Host
from paramserver.worker.flat import FlatSpace
from paramserver.worker.pulled import Pulled, merge


class Weights(Host):
    """Takes in what was pulled."""

    def _install(self, results: list[Pulled]) -> None:
        assert self._weights is not None
        if self.in_place is not None:
            self._weights = self.in_place.install(results)
        else:
            self._bring(results)
        self._versions = [result.version for result in results]
        self.pool.installed(self.version)
        if self._staging is not None:
            self._staging.pool.installed(self.version)
        self.skipped = max(result.skipped for result in results)
        self.taken = results[0].taken
        self.heard_schedule = max(result.schedule for result in results)
        newest = max((result.consistency for result in results), key=lambda c: c.revision)
        if self._consistency is None or newest.revision > self._consistency.revision:
            self._consistency = newest
        self._on_weights(self._weights)
        reach("worker.after_pull", self.version)

    def _bring(self, results: list[Pulled]) -> None:
        """Copy what was pulled to where the model is; that may go on when this returns."""
        assert self._weights is not None
        if self._mover is None:
            self._weights.write(merge(results), self.rounding)
            return
        self._arrived()
        for result in results:
            if result.slot is not None:
                for _, source in self._weights.places(result.chunks, self.rounding):
                    self._mover.lock(source, writable=False)
        places = list(self._weights.places(merge(results), self.rounding))
        self._bringing = self._mover.bring([source for _, source in places], [target for target, _ in places])

    def _arrived(self) -> None:
        """Wait until weights are no longer read where they came from; before that nobody asks for another version."""
        if self._bringing is not None:
            self._bringing.wait()
            self._bringing = None

    def _take_home(self) -> None:
        """Whoever has left is read from no more: the script keeps a copy of the last weights."""
        if self.in_place is not None and self._weights is not None:
            lent, self._weights = self._weights, FlatSpace(self._weights.layout, self._weights.device)
            self._weights.copy_of(lent)
            self.in_place = None
            self._on_weights(self._weights)
