"""The number of workers that operators wish for. This number never changes the slices of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.config import MAX_PROCESSES
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.watching.ending import Ending
from paramserver.coordinator.watching.idle import Idle
from paramserver.core.job.life import BEFORE
from paramserver.core.job.membership import Member, Role
from paramserver.core.job.status import more_of
from paramserver.v1 import coordinator_pb2
from paramserver.wire.bounds import patience

log = structlog.get_logger("paramserver.coordinator")


_WAIT_S = 60.0
_LONGEST_WAIT_S = 600.0


class _Job(ports.Stage, Protocol):
    address: str
    ending: Ending
    draining: set[int]
    journal: Journal
    reports: Reports
    idle: Idle

    @property
    def ended(self) -> bool: ...


class Scaling:
    """The wish for a job. A launcher sees it in the status and obeys. Without a launcher, workers are only drained."""

    def __init__(self, job: _Job) -> None:
        # 0: no wish.
        self.wanted = 0
        self._job = job

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on with the wish that an earlier coordinator has recorded."""
        self.wanted = record.wanted_workers

    async def scale(self, request: coordinator_pb2.ScaleRequest) -> coordinator_pb2.ScaleResponse:
        """Have so many workers; return when there are so many, or when the job has ended meanwhile.

        Raises ConfigError if that is not possible, DeadlineError if it takes longer than the caller waits.
        """
        job, wanted = self._job, request.workers
        wait_s = patience("wait_s", request.wait_s, _LONGEST_WAIT_S)
        if not 1 <= wanted <= MAX_PROCESSES:
            raise errors.ConfigError(f"a job has 1 to {MAX_PROCESSES} workers, not {wanted}")
        if job.life.phase in BEFORE:
            raise errors.ConfigError(f"job {job.options.job!r} has not begun to train yet: try again when it has")
        if job.ended:
            raise errors.ConfigError(f"job {job.options.job!r} has ended ({job.reason})")
        # By rank, without workers that have been asked to leave.
        present = [member for member in self._all() if member.ident not in job.draining]
        if job.options.launched:
            log.info("scaling", workers=wanted, present=len(present))
            self.wanted = wanted
        elif wanted > len(present):
            by_hand = f"paramserver start worker --join {job.address} -- SCRIPT"
            how = more_of(
                "worker",
                wanted,
                (member.restart_command for member in present),
                f"run on each machine that shall have another one: {by_hand}",
            )
            raise errors.ConfigError(
                f"job {job.options.job!r} has {len(present)} workers, and nobody here can start more: {how}"
            )
        else:
            leaving = present[wanted:]
            log.info("scaling", workers=wanted, leaving=[member.name for member in leaving])
            job.draining.update(member.ident for member in leaving)
        job.reports.excuse()
        await job.refresh()
        await job.journal.settled()
        up = wanted > len(present)
        await self._reached(lambda: len(self._all()) >= wanted if up else len(self._all()) <= wanted, wait_s)
        return coordinator_pb2.ScaleResponse(workers=len(self._all()), note=job.idle.sentence())

    def _all(self) -> list[Member]:
        return self._job.members.of(Role.WORKER)

    async def _reached(self, ready: Callable[[], bool], wait_s: float) -> None:
        job = self._job
        deadline = time.monotonic() + (wait_s or _WAIT_S)
        while not ready() and not job.ended and not job.ending.finished:
            if not await job.changes.wait(deadline):
                raise errors.DeadlineError(
                    f"there are {len(self._all())} workers by now; the others follow, paramserver status shows them"
                )
