"""Stalled workers: they live, but hand in nothing. Their slices go to others until they hand in something again."""

from __future__ import annotations

import time
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.work.evaluating import Evaluating
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.job.progress import Progress
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2, shard_pb2

log = structlog.get_logger("paramserver.coordinator")


class _Job(ports.Stage, ports.Commands, Protocol):
    leasing: Leasing
    evaluating: Evaluating
    schedule: Schedule


class Stalls:
    """Watches the reports of the workers of one job that computes slices of a data set."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._progress = Progress(job.options.stall_s)
        self._told: frozenset[int] = frozenset()

    @property
    def members(self) -> frozenset[int]:
        """The workers that are stalled, by member number."""
        return self._progress.stalled

    @property
    def limit_s(self) -> float:
        """For how long a worker may hand in nothing at present; 0: for ever."""
        return self._progress.limit_s if self._job.options.stall_s else 0.0

    def hear(self, member: Member, report: coordinator_pb2.WorkerReport) -> None:
        """A worker reports."""
        if member.role is Role.WORKER:
            self._progress.hear(member.ident, report.slices, report.at_work, report.slice_s, time.monotonic())

    def gone(self, ident: int) -> None:
        """A worker is no longer a member."""
        self._progress.gone(ident)

    async def look(self) -> None:
        """Take the slices of newly stalled workers away; give workers that hand in again their share."""
        if self._job.life.phase is Phase.RUNNING and self._job.schedule.slices_per_epoch:
            for ident in self._progress.look(time.monotonic()):
                self._stalled(ident)
        if self._progress.stalled == self._told:
            return
        for ident in self._told - self._progress.stalled:
            if (member := self._job.members.get(ident)) is not None:
                log.info("a worker gets on again", worker=member.name)
        self._told = self._progress.stalled
        await self._job.refresh()

    def _stalled(self, ident: int) -> None:
        member = self._job.members.get(ident)
        if member is None:
            return
        limit_s = round(self._progress.limit_s, 1)
        log.warning("a worker lives but gets nowhere; its slices go to others", worker=member.name, for_s=limit_s)
        self._job.leasing.give_back(ident)
        self._job.evaluating.give_back(ident)
        if self._job.consistency.mode is not Mode.ASYNC:
            return
        # Its clock must hold no worker back. With its next pull its clock counts again.
        self._job.tasks.begin(self._tell_idle(member))

    async def _tell_idle(self, member: Member) -> None:
        """A server that hangs does not hold the coordinator up."""
        request = shard_pb2.IdleRequest(job=self._job.options.job, timeline=self._job.timeline, worker=member.ident)
        try:
            await self._job.shards.ask("Shard.Idle", request, shard_pb2.IdleResponse, present=True)
        except errors.ParamServerError as error:
            log.warning("a server did not hear of a stalled worker", worker=member.name, error=str(error))
