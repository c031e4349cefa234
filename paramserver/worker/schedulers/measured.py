"""The values by which a scheduler measures the progress of training. All workers agree on them."""

from __future__ import annotations

import structlog

from paramserver.core.work.passes import Passes
from paramserver.worker.engine import Engine

log = structlog.get_logger("paramserver.worker")


class MeasuredValues:
    """The values that one prepared ``ReduceLROnPlateau`` is given. ``name``: the same in all workers."""

    def __init__(self, engine: Engine, passes: Passes, name: str) -> None:
        self._engine, self._passes, self._name = engine, passes, name
        # The epoch of the last value, and how many values it has.
        self._epoch, self._count = -1, 0

    def begin_epoch(self) -> None:
        """An epoch of ``ctx.epochs`` begins, perhaps once more."""
        self._count = 0

    def agree(self, value: float) -> float:
        """The value that counts at this place of the script, in all workers."""
        epoch = self._passes.epoch + 1
        self._count = self._count + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        place = epoch, self._count
        return self._engine.agreeing.agree_on_measured(self._name, place, value, self._passes.planned)

    def so_far(self, epochs: int) -> list[tuple[int, float]]:
        """The values of the first epochs, each with the number of epochs that were over.

        Waits some seconds if other workers may be about to give the last one.
        """
        values = self._engine.agreeing.so_far(self._name, epochs)
        if epochs and not any(epoch == epochs for epoch, _ in values):
            log.warning(
                f"what ReduceLROnPlateau was given after epoch {epochs} is not known: the job has gone on from a "
                "checkpoint of exactly that moment"
            )
        return [(epoch, value) for (epoch, _), value in sorted(values.items()) if epoch <= epochs]
