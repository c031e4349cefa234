"""Where a learning-rate schedule stands: the units of ``len(loader)``, and how many of them have passed."""

from __future__ import annotations

from paramserver.core.versions.consistency import Mode
from paramserver.core.work.data_progress import data_progress, schedule_position, updates_per_epoch
from paramserver.core.work.slices import DataSpec
from paramserver.wire.messages import consistency_from_proto, mode_from_proto, schedule_from_proto
from paramserver.worker.engine import Engine


class SchedulePosition:
    """Progress of the job through its data, as schedules count it; see `core.work.data_progress`.

    Without a data set the position is the version of the weights.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Set once the loader is prepared.
        self.data: DataSpec | None = None
        self._slices = 0

    @property
    def per_epoch(self) -> int:
        """How many updates an epoch has in the mode in which the job began. There must be a data set."""
        assert self.data is not None
        view = self._engine.session.view
        mode = mode_from_proto(view.schedule_mode, Mode.SYNC)
        return updates_per_epoch(self.data.slices_per_epoch, view.slices_per_step, mode)

    def __call__(self) -> int:
        """How many updates the version at hand is from the start."""
        if self.data is None:
            return self._engine.version
        if not self._engine.rolled_back():  # else the view may be of a history that this worker has not followed
            view = self._engine.session.view
            progress = data_progress(
                schedule_from_proto(view, self.data.slices_per_epoch),
                consistency_from_proto(view.consistency),
                view.async_from,
                self._engine.consistency,
            )
            if progress is not None:
                self._slices = progress.slices(self._engine.version)
        return schedule_position(self._slices, self.data.slices_per_epoch, self.per_epoch)
