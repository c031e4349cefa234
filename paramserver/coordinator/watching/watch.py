"""Waiting for members: the log names them, and after a time limit the job fails."""

from __future__ import annotations

import time
from typing import Protocol

import structlog

from paramserver.coordinator.options import JobOptions
from paramserver.core.job.life import Life, Phase
from paramserver.core.job.membership import Membership, Role
from paramserver.core.job.seats import Seats
from paramserver.errors import DeadlineError

log = structlog.get_logger("paramserver.coordinator")

_SAY_S = 5.0
_GOING_ON = (Phase.INITIALISING, Phase.RUNNING)
_TIMED_OUT = DeadlineError.exit_code


class _Recovery(Protocol):
    @property
    def possible(self) -> bool: ...


class _Ending(Protocol):
    finished: bool


class _Job(Protocol):
    options: JobOptions
    life: Life
    members: Membership
    seats: Seats

    @property
    def recovery(self) -> _Recovery: ...

    @property
    def ending(self) -> _Ending: ...

    def missing(self) -> str: ...

    async def fail(self, reason: str, exit_code: int = 1) -> None: ...


class Watch:
    """Looks at the job several times a second (:meth:`look`); every 5 s it logs for which members the job waits."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._started = time.monotonic()
        self._idle_since: float | None = None
        self._said_at = time.monotonic()

    async def look(self) -> None:
        """Fail the job if a member has been away for too long; log for which members the job waits."""
        now, options = time.monotonic(), self._job.options
        waiting = ""
        if gone := self._job.seats.overdue(now, options.max_idle_s):
            await self._job.fail(
                f"{gone.member.name} at {gone.member.address} has been gone for {options.max_idle_s:g} s "
                "(cluster.max_idle_s); its shard of the model is gone"
            )
            return
        if away := self._job.seats.away:
            member = away[-1].member
            waiting = f"{member.name} at {member.address} to come back"
            if self._job.recovery.possible:
                waiting += ", or to be started again"
        phase = self._job.life.phase
        if phase is Phase.WAITING:
            waiting = self._job.missing()
            if options.join_timeout_s and now - self._started > options.join_timeout_s and waiting:
                reason = f"waited {options.join_timeout_s:g} s (cluster.join_timeout_s): {waiting}"
                await self._job.fail(reason, _TIMED_OUT)
                return
        elif phase in _GOING_ON and not self._job.members.of(Role.WORKER) and not self._job.ending.finished:
            self._idle_since = self._idle_since or now
            waiting = waiting or "workers: all are gone; the servers keep the model"
            if now - self._idle_since > options.max_idle_s:
                await self._job.fail(f"no worker has come for {options.max_idle_s:g} s (cluster.max_idle_s)")
                return
        else:
            self._idle_since = None
        self._say(waiting, now)

    def _say(self, waiting: str, now: float) -> None:
        if not waiting:
            self._said_at = now
        elif now - self._said_at >= _SAY_S:
            self._said_at = now
            log.info(f"waiting for {waiting}")
