"""Slices that kill each worker that computes them: they end the job, or are skipped (`training.poison`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.work.agreeing import Agreeing
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.poison import Place, Poison
from paramserver.core.work.slices import places_of, slice_indices
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.bounds import MAX_COUNT

log = structlog.get_logger("paramserver.coordinator")

# Samples of a slice, and slices, that are shown.
_SAMPLES, _SHOWN = 5, 20
# More slices are not skipped: then something else is wrong.
_SKIPPED = 1000
# How long a worker waits while another one computes a slice at which workers have died.
_UNDECIDED_S, _LOOK_S = 3.0, 0.05
_TRAINING = (Phase.RUNNING, Phase.RECOVERING)


class _Job(ports.Stage, ports.Ends, Protocol):
    agreeing: Agreeing
    leasing: Leasing
    reports: Reports
    schedule: Schedule


class PoisonWatch:
    """Follows which slices the workers of one job compute, and at which they die."""

    def __init__(self, job: _Job) -> None:
        # (epoch, index) of slices that count without their samples: no worker computes them.
        self.slices: set[tuple[int, int]] = set()
        self._job = job
        self._poison = Poison()

    @property
    def careful(self) -> bool:
        """Whether workers are to tell which slice they begin."""
        return self._poison.careful

    def hear(self, member: Member, report: coordinator_pb2.WorkerReport) -> None:
        """A worker reports."""
        if member.role is Role.WORKER:
            self._poison.tells(member.ident, place_of(report.computing) if report.HasField("computing") else None)

    async def begin(self, member: int, slice_: types_pb2.SliceRef) -> bool:
        """A worker is about to compute this slice; False if no worker may."""
        place = place_of(slice_)
        slices = self._job.schedule.slices_per_epoch
        if not place.index < slices or place.epoch > MAX_COUNT:
            raise errors.ProtocolError(f"there is no slice {place.index} of epoch {place.epoch}: an epoch has {slices}")
        deadline = time.monotonic() + _UNDECIDED_S
        while self._poison.undecided(place) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        if place.slice in self.slices:
            return False
        self._poison.begins(member, place)
        return True

    async def gone(self, member: Member, died: bool) -> None:
        """A worker is no longer a member."""
        job = self._job
        if not died or not job.schedule.slices_per_epoch or job.life.phase not in _TRAINING:
            self._poison.left(member.ident)
            return
        alone = not any(one.index != member.index for one in job.members.of(Role.WORKER))
        place = self._poison.died(member.ident, self._done, time.monotonic(), member.index, alone)
        if place is None:
            return
        name = self.describe(place)
        if job.options.poison == "fail" or len(self.slices) >= _SKIPPED:
            await job.fail(
                f"each worker that computes {name} dies, {member.name} the last: look at these samples, or set "
                "training.poison = skip, which counts such a slice without its samples"
            )
            return
        self.slices.add(place.slice)
        self._poison.skipped(place)
        log.warning(f"each worker that computes {name} dies: it counts without its samples (training.poison = skip)")

    def look(self) -> None:
        """Workers need not tell which slice they begin, once the job makes progress again."""
        if not self._poison.careful:
            return
        job = self._job
        counted = min((report.applied for report in job.reports.shards()), default=0)
        enough = 2 * (job.options.step_slices + len(job.members.of(Role.WORKER)))
        self._poison.look(counted, enough, self._done, time.monotonic())

    def refs(self) -> list[types_pb2.SliceRef]:
        """The slices that are skipped, for messages."""
        return [types_pb2.SliceRef(epoch=epoch, index=index) for epoch, index in sorted(self.slices)]

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write the skipped slices, and the slices at which workers have died, into the record."""
        record.poisoned.extend(self.refs())
        record.deaths.extend(
            types_pb2.SliceRef(epoch=place.epoch, index=place.index, step=place.step) for place in self._poison.deaths
        )
        record.deaths_in_a_row = self._poison.in_a_row

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self.slices.clear()
        self.skip(record.poisoned)
        self._poison.restore(map(place_of, record.deaths), record.deaths_in_a_row, time.monotonic())

    def skip(self, refs: Iterable[types_pb2.SliceRef]) -> None:
        """Skip these slices from now on, too."""
        self.slices |= {(ref.epoch, ref.index) for ref in refs}

    def described(self) -> list[str]:
        """The slices that are skipped, for people; of many, the last ones."""
        known = sorted(self.slices)
        more = [f"{len(known) - _SHOWN} more slices of earlier epochs"] if len(known) > _SHOWN else []
        return more + [self.describe(Place(epoch, index)) for epoch, index in known[-_SHOWN:]]

    def describe(self, place: Place) -> str:
        """For example "slice 3 of epoch 1 (step 7; samples 12, 55, 81, ...)". Epochs count from 1, as in the ledger."""
        data = self._job.schedule.data
        assert data is not None
        step = [f"step {place.step}"] if place.step is not None else []
        if data.drawn:  # only workers know the sampler
            first, stop = places_of(data, place.index)
            shown = f"entries {first} to {stop - 1} of the sampler"
        else:
            number = place.epoch + self._job.agreeing.first_epoch
            samples = slice_indices(data, self._job.options.seed, number, place.index, _SAMPLES + 1)
            shown = "samples " + ", ".join(map(str, samples[:_SAMPLES])) + (", ..." if len(samples) > _SAMPLES else "")
        return f"slice {place.index} of epoch {place.epoch + 1} ({'; '.join([*step, shown])})"

    def _done(self, place: Place) -> bool:
        """Whether the slice has counted on all servers."""
        job = self._job
        if place.step is not None:
            reports = job.reports.shards()
            return bool(reports) and min(report.version for report in reports) > place.step
        table = job.leasing.table
        return table is None or table.is_done(AsyncName(place.epoch, place.index))


def place_of(ref: types_pb2.SliceRef) -> Place:
    """The place that a message names."""
    return Place(ref.epoch, ref.index, ref.step if ref.HasField("step") else None)
