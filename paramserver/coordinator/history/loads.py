"""``ctx.load``: all workers agree on it, then all shards begin another timeline with what one of them uploads.

Version, counts and position stay as they are. A job with checkpoints saves the version before the load begins, and the
loaded weights before a worker goes on. A job that goes back meanwhile has either all of the load or nothing. If it has
nothing, the workers still wait, and begin the load once more.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.manifests import load_from_proto
from paramserver.coordinator.history.securing import make_safe
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.coordinator.work.schedule import Schedule
from paramserver.coordinator.work.shards import lease_table, stand_even
from paramserver.core.job.life import LoadBegins, Loaded, Phase, Uploads
from paramserver.core.job.membership import Member, Role
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.loading import Agreement, Load
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.bounds import counting, text

log = structlog.get_logger("paramserver.coordinator")

# How long a call is parked; then the worker asks again.
_PARK_S = 2.0
# How often the coordinator looks whether a worker has gone on to the next step.
_GONE_ON_S = 0.2
_RETRY_S = 0.2


class _CannotError(Exception):
    """Why a load cannot be done, in a sentence."""


class _Job(ports.Stage, ports.Course, ports.Commands, ports.Ends, Protocol):
    draining: set[int]
    checkpoints: Checkpoints
    keeping: Keeping
    leasing: Leasing
    mode_change: ModeChange
    registry: ModelRegistry
    reports: Reports
    schedule: Schedule

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def replication(self) -> ports.Replicating: ...

    @property
    def resizing(self) -> ports.Resizing: ...

    def missing(self) -> str: ...


class Loads:
    """The loads of one job, one at a time."""

    def __init__(self, job: _Job) -> None:
        self.agreement = Agreement()
        # The load that is under way: shards begin its timeline, or have begun it.
        self.under_way: Load | None = None
        # The version at which the load happens.
        self.version = 0
        self._job = job
        self._task: asyncio.Task[None] | None = None
        self._looked = 0.0
        # The newest version when a worker was first seen to wait.
        self._from: int | None = None

    def restore(self, loaded: coordinator_pb2.LoadPlace) -> None:
        """Go on from the last load that an earlier coordinator or a checkpoint has recorded."""
        self.agreement.done = load_from_proto(loaded)

    def lost(self, saved: Load) -> bool:
        """Whether going back to a checkpoint with this load would undo a later load that workers have seen done."""
        return saved.place < self.agreement.done.place

    # ---- calls

    async def call(self, request: coordinator_pb2.LoadRequest) -> coordinator_pb2.LoadResponse:
        """Park a worker for a while, until the load is done. Raises ModelError if it cannot be done."""
        job, load = self._job, load_from_proto(request.place)
        counting("the epoch of a load", load.place.epoch)
        if not counting("the number of a load", load.place.count):
            raise errors.ProtocolError("a load is counted from 1")
        text("the digest of what is loaded", load.digest)
        deadline = time.monotonic() + _PARK_S
        while True:
            if request.timeline != job.timeline or job.recovery.under_way:
                return coordinator_pb2.LoadResponse(waiting_for="the job, which is on another timeline now")
            if self.under_way is None:
                try:
                    if self.agreement.call(request.member, load, self._taking_part()):
                        await job.keeping.settled()
                        return coordinator_pb2.LoadResponse(done=True)
                except ValueError as error:
                    await job.changes.notify()
                    raise errors.ModelError(str(error)) from error
                self.look()
            if not await job.changes.wait(deadline):
                return coordinator_pb2.LoadResponse(waiting_for=self._waiting_for())

    def _taking_part(self) -> list[int]:
        """The workers that must call the load. A worker that has not begun is let in when the load is done."""
        job = self._job
        alive = job.members.of(Role.WORKER)
        beginning = job.reports.newest_version() == 0
        return [one.ident for one in alive if beginning or one.ident in job.registry.registered]

    def _alive(self) -> list[int]:
        draining = self._job.draining
        return [one.ident for one in self._job.members.of(Role.WORKER) if one.ident not in draining]

    def _waiting_for(self) -> str:
        names = {one.ident: one.name for one in self._job.members.of(Role.WORKER)}
        missing = [names[ident] for ident in self.agreement.missing(self._alive()) if ident in names]
        return f"{', '.join(missing)} to call ctx.load" if missing else "the servers, which take in what is loaded"

    def may_begin(self, worker: int) -> bool:
        """Whether a worker may take the model: not in the middle of a load in which it has no part."""
        return self.under_way is None and (not self.agreement.pending or worker in self.agreement.awaited)

    def callers(self) -> frozenset[int]:
        """The workers that have called the load: any of them can upload the loaded state."""
        return frozenset(self.agreement.called)

    # ---- before the load

    def look(self) -> None:
        """Begin the load once all workers have called it. Called several times a second."""
        job = self._job
        if not self.agreement.pending:
            self._from = None
        if not self.agreement.pending or (self._task is not None and not self._task.done()):
            return
        if job.life.phase is not Phase.RUNNING or job.recovery.under_way or job.seats.away or job.resizing.under_way:
            return
        load = self.agreement.agreed(self._alive())
        if load is not None:
            self._task = job.tasks.begin(self._run(load))
        elif job.consistency.mode is Mode.SYNC and time.monotonic() - self._looked > _GONE_ON_S:
            self._looked = time.monotonic()
            self._task = job.tasks.begin(self._gone_on())

    def ended(self, member: Member, ended: bool) -> None:
        """A worker leaves. ``ended``: its script has come to its end."""
        missing = self.agreement.missing(self._alive())
        if ended and self.under_way is None and member.ident in missing:
            self.agreement.refuse(
                f"the script of {member.name} has ended, while other workers wait in ctx.load: call it in every worker"
            )

    def worker_gone(self, ident: int) -> None:
        """The worker is no longer a member."""
        self.agreement.gone(ident)
        if self.under_way is not None and not self.agreement.called:
            self._job.tasks.begin(self._nobody())

    async def _nobody(self) -> None:
        job = self._job
        why = "all workers that had called ctx.load are gone"
        if not job.recovery.possible:
            await job.fail(f"{why}, and there is no checkpoint to go back to: set checkpoint.dir")
        elif not job.recovery.under_way:
            job.recovery.begin(why)

    def abandon(self) -> None:
        """The job goes back: workers that wait begin the load once more."""
        self.under_way = None
        self.agreement.forget()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def _gone_on(self) -> None:
        """Refuse the load if a worker went on to the next step: its script did not call the load."""
        try:
            stats = await self._job.shards.stats()
        except errors.ParamServerError:
            return
        newest = max((one.version for one in stats), default=0)
        self._from = newest if self._from is None else self._from
        if (newest > self._from or any(one.missing_of for one in stats)) and self.agreement.pending:
            names = self._waiting_for().removesuffix(" to call ctx.load")
            self.agreement.refuse(
                f"{names} has gone on to the next step, while other workers wait in ctx.load: call it in every worker "
                "at the same place, best between two epochs"
            )
            await self._job.changes.notify()

    # ---- the load

    async def _run(self, load: Load) -> None:
        job = self._job
        try:
            version = await self._rest()
            if job.checkpoints.place is not None:
                await make_safe(job, job.checkpoints, version)
                if not job.checkpoints.safe(version):
                    raise _CannotError("no checkpoint of the version before it can be written")
            if await self._rest() != version or self.agreement.agreed(self._alive()) != load:
                return  # a worker came or went; the next look begins again
            self.version, self.under_way = version, load
            await self._begin()
        except _CannotError as error:
            self.agreement.refuse(f"ctx.load cannot be done: {error}")
            await job.changes.notify()
        except errors.RolledBackError:
            return
        except errors.FencedError as error:
            await job.replaced(str(error))
        except errors.ParamServerError as error:
            if self.under_way is not None:
                await job.fail(f"ctx.load could not be done: {error}")
            else:  # the next look tries again
                log.info(f"ctx.load waits: {error}")
        except Exception as error:  # the top of a task: workers that wait for it must not wait for ever
            log.exception("ctx.load failed")
            await job.fail(f"ctx.load could not be done: {error}")

    async def _rest(self) -> int:
        """The version at which all shards stand, with nothing open."""
        stats = await stand_even(self._job, at_rest=True)
        if stats is None:
            raise _CannotError("the servers do not come to stand at one version, since a worker was lost")
        if any(one.missing_of for one in stats):
            raise _CannotError(
                f"step {stats[0].version} has begun, since workers have handed in slices of it: call it between "
                "two steps, best between two epochs"
            )
        return stats[0].version

    async def _begin(self) -> None:
        """Let all shards begin another timeline, for which one worker uploads the loaded state."""
        job = self._job
        await job.mode_change.close()
        table = await lease_table(job)
        await job.leasing.begin(None)
        stats = await job.shards.stats()
        if not job.life.handle(LoadBegins()):  # the job has ended meanwhile
            self.under_way = None
            return
        job.life.begin_timeline(*(reply.timeline for reply in stats))
        job.registry.begin_load()
        job.replication.pause(stay=True)
        job.checkpoints.new_timeline(self.version)
        # Under a revision that no worker has heard of.
        job.life.agree(replace(job.consistency, revision=job.mode_change.next_revision()))
        await job.refresh()
        await job.keeping.settled()
        await self._configure()
        job.reopen_mode_change()
        await job.leasing.begin(table)
        job.registry.upload_again()
        job.life.handle(Uploads())
        await job.keeping.tell()
        await job.refresh()

    async def _configure(self) -> None:
        job = self._job

        def request(shard: int) -> shard_pb2.ConfigureRequest:
            configure = job.registry.configuration(shard)
            configure.keep, configure.version = True, self.version
            return configure

        deadline = time.monotonic() + job.options.call_timeout_s
        while True:
            try:
                await job.shards.ask("Shard.Configure", request, shard_pb2.ConfigureResponse)
                return
            except errors.RetryableError as error:
                if time.monotonic() > deadline:
                    raise
                log.info(f"ctx.load waits: {error}")
                await asyncio.sleep(_RETRY_S)

    def complete(self) -> None:
        """The uploaded state is published, and in a checkpoint if the job has checkpoints."""
        load, self.under_way = self.under_way, None
        if load is not None:
            self.agreement.complete(load)
            self._job.life.handle(Loaded())
            self._job.mode_change.bring_back()
            log.info("the scripts have loaded weights or optimizer state", version=self.version, place=str(load.place))
