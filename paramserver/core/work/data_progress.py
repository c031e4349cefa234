"""How far a job is through its data at each version, across changes of the mode; and a schedule's position in that.

A learning-rate schedule is built for a number of updates, ``epochs * len(loader)``. In synchronous mode an update takes
the slices of a step, in asynchronous mode one slice, and the mode of a running job may change. So a schedule's position
is progress through the data: the slices that are done, in the units that ``len(loader)`` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.work.slices import SyncSchedule


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Which version has seen how many slices, for a job with a data set.

    ``origin``: the steps since the job became synchronous last. ``async_from``: from this version on, each version adds
    one slice; None: the job is synchronous.
    """

    origin: SyncSchedule
    async_from: int | None = None

    def slices(self, version: int) -> int:
        """How many slices, of all epochs, have been done when ``version`` stands."""
        steps_until = version if self.async_from is None else min(version, self.async_from)
        base = self.origin.base_version
        if steps_until < base:  # before the steps began each version was one slice
            return max(0, self._by_steps(base) - (base - version))
        return self._by_steps(steps_until) + version - steps_until

    def _by_steps(self, version: int) -> int:
        epoch, remaining = self.origin.position(version)
        return (epoch + 1) * self.origin.slices_per_epoch - sum(hi - lo for lo, hi in remaining)


def data_progress(
    origin: SyncSchedule, announced: Consistency, async_from: int, newest: Consistency
) -> DataProgress | None:
    """Progress, as far as a worker knows that has heard of the setting ``newest``, perhaps before it was ``announced``.

    ``origin`` and ``async_from`` (which counts in asynchronous mode only) belong to the setting that was announced.
    None: the progress is not known, since the announcement is still on its way.
    """
    if announced.mode is Mode.ASYNC:
        return DataProgress(origin, async_from)
    if newest.revision <= announced.revision:
        return DataProgress(origin)
    if newest.mode is Mode.ASYNC and newest.from_version:
        return DataProgress(origin, newest.from_version)
    return None


def updates_per_epoch(slices_per_epoch: int, slices_per_step: int, mode: Mode) -> int:
    """How many updates an epoch has in this mode: the units of schedules."""
    return slices_per_epoch if mode is Mode.ASYNC else -(-slices_per_epoch // slices_per_step)


def schedule_position(slices: int, slices_per_epoch: int, units_per_epoch: int) -> int:
    """How many units have passed when so many slices are done.

    It never falls, is 0 at the start, ``epochs * units_per_epoch`` when all is done, and less before. In a job whose
    mode never changes, and with `updates_per_epoch` units, it is the number of updates.
    """
    return slices * units_per_epoch // slices_per_epoch
