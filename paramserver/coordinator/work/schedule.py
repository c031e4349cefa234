"""The data set of the job, how its slices are dealt out to synchronous steps, and where asynchronous mode began."""

from __future__ import annotations

from paramserver.coordinator import ports
from paramserver.core.versions.ranges import complement
from paramserver.core.work.leases import SliceLeases
from paramserver.core.work.slices import DataSpec, SyncSchedule, schedule_of
from paramserver.v1 import coordinator_pb2
from paramserver.wire.messages import data_from_proto, mode_from_proto, schedule_from_proto


class Schedule:
    """The schedule of one job on its present timeline."""

    def __init__(self, job: ports.Stage) -> None:
        self._job = job
        self.data: DataSpec | None = None
        self.origin = SyncSchedule(0, job.options.step_slices)
        # The version with which asynchronous mode began, if the job is asynchronous.
        self.async_from = 0
        # The mode in which the job began. Learning-rate schedules count updates of this mode.
        self.mode = job.options.consistency.mode

    @property
    def slices_per_epoch(self) -> int:
        """How many slices an epoch has; 0: the job has no data set, or has not heard of it yet."""
        return self.data.slices_per_epoch if self.data is not None else 0

    def register(self, data: DataSpec) -> None:
        """Take over the data set, and how it is cut into slices."""
        self.data = data
        self.origin = schedule_of(data, self._job.options.step_slices)

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator, or of a checkpoint."""
        self.async_from = record.async_from
        self.mode = mode_from_proto(record.view.schedule_mode, self.mode)
        if record.HasField("data"):
            self.data = data_from_proto(record.data)
        elif self.data is not None:  # the record was made before the data was known
            self.origin = schedule_of(self.data, self._job.options.step_slices)
            return
        self.origin = schedule_from_proto(record.view, self.data)

    def begin_async(self, version: int) -> SliceLeases:
        """Asynchronous mode begins with this version; return leases of all slices that the steps have left."""
        self.async_from = version
        return SliceLeases(self.slices_per_epoch, *self.done_synchronously())

    def begin_sync(self, version: int, table: SliceLeases | None) -> None:
        """Synchronous mode begins with this version, with the slices that the leases have left."""
        slices = self._job.options.step_slices
        if table is not None and self.slices_per_epoch:
            turns = self.data.turns if self.data is not None else 1
            self.origin = SyncSchedule(self.slices_per_epoch, slices, version, *table.position(), turns=turns)
        else:
            self.origin = SyncSchedule(0, slices, version)

    def done_synchronously(self) -> tuple[int, list[tuple[int, int]]]:
        """The position at which asynchronous mode began: (epoch, its ranges of slices that were done by then)."""
        if self.slices_per_epoch:
            epoch, remaining = self.origin.position(self.async_from)
            return epoch, complement(remaining, self.slices_per_epoch)
        used = self.async_from * self._job.options.step_slices
        return 0, [(0, used)] if used else []
