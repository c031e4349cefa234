"""The watchdog of a job: calls the job stuck when no member can make progress, and ends it when that lasts."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from paramserver.coordinator import ports
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.watching.ending import Ending
from paramserver.coordinator.watching.stalls import Stalls
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Role
from paramserver.core.job.watchdog import Sight, Watchdog
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")

# How long no script may be at work if `cluster.stall_s` is 0, which is meant for scripts that take long.
_NOBODY_S = 8.0


class _Job(ports.Stage, ports.Ends, Protocol):
    address: str
    over: asyncio.Future[str]
    reports: Reports
    schedule: Schedule
    stalls: Stalls
    ending: Ending

    @property
    def recovery(self) -> ports.GoingBack: ...


class Stuck:
    """Looks several times a second. ``reason``: why the job is stuck; empty while it makes progress."""

    def __init__(self, job: _Job) -> None:
        self.reason = ""
        self._job = job
        self._watchdog = Watchdog()

    async def look(self) -> None:
        """Note whether the job is stuck; end it if it was so without hope for longer than `cluster.max_idle_s`."""
        verdict = self._watchdog.look(self._sight(), time.monotonic())
        if verdict.stuck and not self.reason:
            log.warning("the job is stuck", reason=verdict.stuck)
        elif self.reason and not verdict.stuck:
            log.info("the job gets on again")
        self.reason = verdict.stuck
        limit_s = self._job.options.max_idle_s
        if verdict.hopeless and verdict.for_s > limit_s:
            await self._job.fail(f"the job has been stuck for {limit_s:g} s (cluster.max_idle_s): {verdict.stuck}")

    def _sight(self) -> Sight | None:
        job = self._job
        if job.life.phase is not Phase.RUNNING or job.over.done() or job.ending.closing:
            return None
        missed = self._missed()
        workers = job.members.of(Role.WORKER)
        if not workers and not missed:
            return None
        reports = job.reports.workers
        shards = job.reports.shards()
        if any(copy.state == shard_pb2.COPY_STATE_WRITING for report in shards for copy in report.copies):
            return None  # the copy may hold the next version up; `Overdue` warns of one that takes too long
        names = {one.ident: one.name for one in (*workers, *job.members.of(Role.SERVER))}
        return Sight(
            progress=(
                job.timeline,
                job.consistency.revision,
                bool(workers),
                sum(report.slices for report in reports.values()),
                tuple(sorted((r.incarnation, r.shard, r.version, r.applied, r.bytes_pushed) for r in shards)),
            ),
            limit_s=max(job.stalls.limit_s or _NOBODY_S, self._moving_s(len(workers))),
            at_work=[names[ident] for ident, report in sorted(reports.items()) if report.at_work and ident in names],
            watched=bool(job.options.stall_s and job.schedule.slices_per_epoch),
            waits=[
                f"{names[ident]} waits for {waiting}"
                for ident, waiting in sorted(job.reports.waits().items())
                if waiting and ident in names
            ],
            missed=missed,
        )

    def _missed(self) -> list[str]:
        """Missing members, if there is no launcher that starts them again."""
        job = self._job
        if job.options.launched:
            return []
        end = f"the job ends {job.options.max_idle_s:g} s after it was lost (cluster.max_idle_s)"
        found = [
            f"{server.name} at {server.address} is lost: bring it back"
            + (f", or run: paramserver start server --join {job.address}" if job.recovery.possible else "")
            + f"; {end}"
            for server in (away.member for away in job.seats.away)
        ]
        if job.reports.missed and not job.members.of(Role.WORKER):
            found.append(
                f"{', '.join(job.reports.missed)} is lost, and no worker is left: run: "
                f"paramserver start worker --join {job.address} -- SCRIPT"
            )
        return found

    def _moving_s(self, workers: int) -> float:
        """The time that all weights and gradients need over one link, in seconds."""
        nbytes = sum(report.shard_bytes for report in self._job.reports.shards())
        return 2 * max(workers, 1) * nbytes * 8 / (self._job.options.link_mbps * 1e6)
