"""Where a learning-rate schedule stands, in units of ``len(loader)``."""

from __future__ import annotations

from paramserver.core.versions.consistency import Mode
from paramserver.core.work.data_progress import data_progress, schedule_position, updates_per_epoch
from paramserver.core.work.slices import DataSpec
from paramserver.wire.messages import consistency_from_proto, mode_from_proto, schedule_from_proto
from paramserver.worker.data.numbers import EpochNumbers
from paramserver.worker.engine import Engine


class SchedulePosition:
    """Progress of the job through its data, as schedules count it; see `core.work.data_progress`.

    Without a data set the position is the version of the weights.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.numbers = EpochNumbers(engine.agreeing)
        self.data: DataSpec | None = None
        self._slices = 0

    def loader_comes(self, data: DataSpec) -> None:
        """The loader is prepared, and this is its data."""
        self.data = data

    @property
    def batches_per_epoch(self) -> int:
        """The length of the loader: batches in an epoch; synchronous: divided by the slices of a step, rounded up.

        In the mode in which the job began. There must be a data set.
        """
        assert self.data is not None
        view = self._engine.member.session.view
        mode = mode_from_proto(view.schedule_mode, Mode.SYNC)
        return updates_per_epoch(self.data.batches_per_epoch, view.slices_per_step, mode)

    @property
    def per_epoch(self) -> int:
        """How many updates an epoch has in the mode in which the job began. There must be a data set."""
        assert self.data is not None
        return -(-self.batches_per_epoch // self.data.batches)

    def __call__(self) -> int:
        """How many updates the version at hand is from the start."""
        if self.data is None:
            return self._engine.weights.version
        if not self._engine.member.rolled_back():  # else the view may be of a history that this worker has not followed
            view = self._engine.member.session.view
            progress = data_progress(
                schedule_from_proto(view, self.data),
                consistency_from_proto(view.consistency),
                view.async_from,
                self._engine.modes.present,
            )
            if progress is not None:
                self._slices = progress.slices(self._engine.weights.version)
        return schedule_position(self._slices, self.data.slices_per_epoch, self.per_epoch)
