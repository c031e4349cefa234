"""Waiting for members: the log names them, and after a time limit the job fails."""

from __future__ import annotations

import time
from typing import Protocol

import structlog

from paramserver.coordinator.options import JobOptions
from paramserver.core.job.life import Life, Phase
from paramserver.core.job.membership import Member, Membership, Role
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
        # Servers that were given up for lost but may come back with their shard, by index.
        self.absent: dict[int, Member] = {}
        self._lost_at: dict[int, float] = {}
        self._started = time.monotonic()
        self._idle_since: float | None = None
        self._said_at = time.monotonic()

    def server_lost(self, member: Member, reason: str) -> None:
        """A server is silent. If it is only cut off, it still has its shard."""
        self.absent[member.index] = member
        self._lost_at[member.index] = time.monotonic()
        log.warning("a server is gone; the job waits for it", server=member.name, at=member.address, reason=reason)

    def server_back(self, index: int, with_shard: bool = True) -> None:
        """A server has joined again; without its shard, if it has begun anew or is another one."""
        if index in self.absent:
            tell, text = (log.info, "is back") if with_shard else (log.warning, "has begun anew, without its shard")
            tell(f"a server {text}", server=f"server-{index}", after_s=round(self._away_s(index), 1))
            del self.absent[index], self._lost_at[index]

    def _away_s(self, index: int) -> float:
        return time.monotonic() - self._lost_at[index]

    async def look(self) -> None:
        """Fail the job if a member has been away for too long; log for which members the job waits."""
        now, options = time.monotonic(), self._job.options
        waiting = ""
        for index, member in sorted(self.absent.items()):
            if self._away_s(index) > options.max_idle_s:
                await self._job.fail(
                    f"{member.name} at {member.address} has been gone for {options.max_idle_s:g} s "
                    "(cluster.max_idle_s); its shard of the model is gone"
                )
                return
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
