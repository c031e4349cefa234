"""Before a job ends: its last step is completed, its last version and records are saved, and its accounts compared.

This is done whenever the last worker has left. The job may then end at any moment, by itself, by an operator or with
the launcher, and no contribution that was handed in is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.securing import make_safe
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.promises import Promises
from paramserver.coordinator.watching.main import Main
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.coordinator.watching.records import Records
from paramserver.coordinator.work.accounts import Accounting
from paramserver.coordinator.work.schedule import Schedule
from paramserver.coordinator.work.shards import stand_even
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.job.tally import Shard, Tally, imbalances, not_counted
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2, shard_pb2

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02
# How long servers that have heard of all contributions may need until they stand at the same version.
_EVEN_S = 10.0
# Lines of the end that are kept, and characters of each.
_LINES, _CHARACTERS = 50, 2000
# Epochs that are named one by one whose samples have not counted once.
_EPOCHS = 10
# The numbers of so many departed workers are kept one by one.
_KEPT = 256


class _Job(ports.Stage, ports.Commands, ports.Ends, Protocol):
    promises: Promises
    schedule: Schedule
    accounting: Accounting
    poison: PoisonWatch
    registry: ModelRegistry
    checkpoints: Checkpoints
    main: Main
    records: Records

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def resizing(self) -> ports.Resizing: ...

    def end(self, how: str) -> None: ...


class Ending:
    """Prepares a job without workers for its end. :meth:`look` is called several times a second."""

    def __init__(self, job: _Job) -> None:
        # Whether some worker has been through all epochs.
        self.finished = False
        # Whether some worker's script has come to its end.
        self.script_ended = False
        # Whether the last worker that left was not lost, so that its contributions have arrived at all servers.
        self.orderly = False
        self._job = job
        # The timeline and the membership for which all is done.
        self._settled: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._said = ""
        # For how many epochs the scripts train, as far as they have said so.
        self.epochs_planned = 0
        # The last report of each worker, by member number; and the tallies of workers that are gone, by process.
        self._reports: dict[int, coordinator_pb2.WorkerReport] = {}
        self._gone: dict[int, coordinator_pb2.Tally] = {}
        # How people are told that the run has ended, and its last lines; None: nobody has said so yet.
        self.how: Phase | None = None
        self.said: list[str] = []

    def say(self, how: Phase, lines: Iterable[str]) -> None:
        """The run has ended, as a launcher or this coordinator says to people in its last lines."""
        self.how, self.said = how, [line[:_CHARACTERS] for line in filter(None, lines)][:_LINES]

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write into the record of the job how scripts have ended."""
        record.finished, record.script_ended, record.orderly = self.finished, self.script_ended, self.orderly
        record.epochs_planned = self.epochs_planned
        record.tallies.extend(self.tallies())

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self.finished, self.script_ended, self.orderly = record.finished, record.script_ended, record.orderly
        self.epochs_planned = record.epochs_planned
        self._gone = {tally.incarnation: tally for tally in record.tallies}

    def tallies(self) -> list[coordinator_pb2.Tally]:
        """The contributions that workers had handed in which are gone."""
        return [tally for _, tally in sorted(self._gone.items())]

    @property
    def closing(self) -> bool:
        """Whether there is no worker, and the job may not end yet."""
        job = self._job
        if job.members.of(Role.WORKER) or not job.registry.ready:
            return False
        if job.life.phase is Phase.RECOVERING:
            return True
        stopping = job.life.phase is Phase.STOPPED and not job.life.released
        return (job.life.phase is Phase.RUNNING or stopping) and self._settled != self._now

    @property
    def _now(self) -> tuple[int, int]:
        return self._job.timeline, self._job.members.generation

    def hear(self, member: Member, report: coordinator_pb2.WorkerReport) -> None:
        """A member or an observer reports."""
        if member.role is not Role.WORKER:
            return
        self._reports[member.ident] = report
        self.epochs_planned = max(self.epochs_planned, report.epochs_planned)

    def leaving(self, request: coordinator_pb2.SessionRequest) -> None:
        """A worker says goodbye."""
        self.finished = self.finished or request.finished
        self.script_ended = self.script_ended or request.ended

    def worker_gone(self, member: Member, lost: bool) -> None:
        """A worker is no longer a member."""
        report = self._reports.pop(member.ident, coordinator_pb2.WorkerReport())
        tally = report.tally
        tally.name, tally.incarnation, tally.lost = member.name, member.incarnation or member.ident, lost
        tally.version = report.version
        self._gone[tally.incarnation] = tally
        if len(self._gone) > _KEPT:
            self._gone = {one.incarnation: one for one in folded(list(self._gone.values()), _KEPT // 2)}
        self.orderly = not lost
        self.look()

    def undone(self, version: int, reached: int) -> None:
        """The job has gone back to ``version`` from ``reached``."""
        job = self._job
        if reached <= version:
            return
        job.main.undone()
        if not job.members.of(Role.WORKER):  # other workers have to do the steps again
            self.finished = self.script_ended = False
        gone = sorted({one.name for one in self._gone.values() if one.handed_in and one.version > version})
        if gone and not job.schedule.slices_per_epoch:
            job.promises.broken["undone"] = (
                f"a server was lost, and the job went back from version {reached} to {version} after "
                f"{', '.join(gone)} had left: what was handed in meanwhile is lost, and nobody can hand it in again. "
                "Run it again, with a smaller checkpoint.every if servers die often."
            )

    def look(self) -> None:
        """Begin in the background, if the job has come to rest and no such task is at work."""
        job = self._job
        busy = self._task is not None and not self._task.done()
        if busy or job.recovery.under_way or job.seats.away or job.resizing.under_way:
            return
        if self.closing:
            self._task = job.tasks.begin(self._run())

    async def _run(self) -> None:
        now = self._now
        try:
            await self._settle()
        except errors.RolledBackError:
            return
        except errors.FencedError as error:
            await self._job.replaced(str(error))
            return
        except errors.ParamServerError as error:  # the next look tries again
            if str(error) != self._said:
                self._said = str(error)
                log.info(f"the end of the job waits: {error}")
            return
        if now == self._now:
            self._settled = now
            await self._job.changes.notify()
            if self.finished or (self.script_ended and self.orderly):
                self._job.end("done")

    async def _settle(self) -> None:
        job = self._job
        stats = await stand_even(job)
        if stats is not None and await self._complete_step(stats):
            stats = await stand_even(job)
        if stats is None:
            job.promises.broken["versions"] = (
                "the servers stand at different versions: a worker was lost while it handed something in, and nobody "
                "has come in its place. The last version cannot be saved; go on from the last checkpoint."
            )
            return
        job.promises.broken.pop("versions", None)
        await job.records.settle()
        await make_safe(job, job.checkpoints, stats[0].version)
        await job.checkpoints.best.write()
        await self._balance(stats)

    async def _complete_step(self, stats: list[shard_pb2.StatsResponse]) -> bool:
        """Without a data set: complete the open step with the slices that have come. No worker brings the rest."""
        job = self._job
        may = self.orderly or job.life.phase is Phase.STOPPED
        if job.schedule.slices_per_epoch or job.consistency.mode is not Mode.SYNC or not may:
            return False
        first = stats[0]
        if not first.missing_of or not first.missing:
            return False
        if any(list(one.missing) != list(first.missing) for one in stats):
            return False  # a part of a contribution has got lost with its worker
        request = shard_pb2.CutRequest(
            job=job.options.job,
            timeline=job.timeline,
            term=job.term,
            step=shard_pb2.CutRequest.STEP_FILL,
            version=first.version,
            missing=first.missing,
            of=first.missing_of,
        )
        await job.shards.ask("Shard.Cut", request, shard_pb2.CutResponse)
        log.info(
            "the last step is made of the contributions that came",
            version=first.version,
            slices=f"{first.missing_of - sum(gap.stop - gap.start for gap in first.missing)} of {first.missing_of}",
        )
        deadline = time.monotonic() + _EVEN_S
        while min(one.version for one in await job.shards.stats()) <= first.version:
            if time.monotonic() > deadline:
                raise errors.UnavailableError(f"step {first.version} is not complete yet")
            await asyncio.sleep(_LOOK_S)
        return True

    # ---- the accounts

    async def _balance(self, stats: list[shard_pb2.StatsResponse]) -> None:
        """Compare the contributions that were handed in with those that counted; a difference is a broken promise."""
        job = self._job
        found = await self._twice() if job.schedule.slices_per_epoch else self._imbalances(stats)
        if found:
            job.promises.broken["accounts"] = " ".join(found)
        else:
            job.promises.broken.pop("accounts", None)

    async def _twice(self) -> list[str]:
        """With a data set: sentences about samples that counted twice, or not at all though the job is through."""
        job = self._job
        found = []
        for epoch in (await job.accounting.of(coordinator_pb2.AccountsRequest())).epochs:
            if epoch.twice:
                found.append(f"{epoch.twice} samples of epoch {epoch.epoch} have counted more than once.")
            if epoch.never and self.finished and epoch.epoch < self.epochs_planned:
                found.append(f"{epoch.never} samples of epoch {epoch.epoch} have not counted.")
        more = [f"See `paramserver ledger` for {len(found) - _EPOCHS} more epochs."] if len(found) > _EPOCHS else []
        return found[:_EPOCHS] + more

    def _tallies(self) -> list[Tally]:
        return [
            Tally(one.name, one.handed_in, one.counted, one.late, one.duplicate, one.lost, one.unsent)
            for one in self._gone.values()
            if one.timeline == self._job.timeline
        ]

    def not_counted(self) -> dict[str, int]:
        """By reason, how many contributions of workers that are gone did not count."""
        return not_counted(self._tallies())

    def _imbalances(self, stats: list[shard_pb2.StatsResponse]) -> list[str]:
        """Without a data set: sentences about differences between the tallies of workers and of servers."""
        shards = [
            Shard(
                f"server-{index}",
                one.applied - one.applied_before,
                one.missing_of - sum(gap.stop - gap.start for gap in one.missing) if one.missing_of else 0,
            )
            for index, one in enumerate(stats)
        ]
        return imbalances(self._tallies(), shards)


def folded(tallies: list[coordinator_pb2.Tally], kept: int) -> list[coordinator_pb2.Tally]:
    """The last ``kept`` tallies, after one sum of the earlier ones. The sum leaves out timelines that are undone."""
    first, rest = tallies[:-kept], tallies[-kept:]
    total = coordinator_pb2.Tally(name="earlier workers", timeline=max(one.timeline for one in first))
    for one in first:
        total.version = max(total.version, one.version)
        if one.timeline == total.timeline:
            total.lost = total.lost or one.lost
            for field in ("handed_in", "counted", "late", "duplicate", "unsent"):
                setattr(total, field, getattr(total, field) + getattr(one, field))
    return [total, *rest]
