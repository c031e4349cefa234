"""Going back to a checkpoint: when a server has begun anew, all shards restore a checkpoint, on a new timeline.

`core/procedures/rollback.py` decides what is done when; here it is done.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint import manifest
from paramserver.checkpoint.manifest import Manifest
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.choosing import Choosing
from paramserver.coordinator.history.loads import Loads
from paramserver.coordinator.history.manifests import model_of, position_of
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.promises import Promises
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.watching.ending import Ending
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.coordinator.work.agreeing import Agreeing
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.coordinator.work.registered import Registered
from paramserver.coordinator.work.schedule import Schedule
from paramserver.coordinator.work.shards import lease_table
from paramserver.core.job.life import GoesBack, Phase, WentBack
from paramserver.core.procedures.rollback import (
    Ask,
    AwaitServers,
    BeginTimeline,
    Command,
    Done,
    EndOld,
    Event,
    Failed,
    GiveUp,
    GoOn,
    Kind,
    Reason,
    Restore,
    Resumes,
    Rollback,
    Saved,
    SetUp,
    StepDown,
    Told,
)
from paramserver.core.work.leases import SliceLeases
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import consistency_from_proto, consistency_to_proto

log = structlog.get_logger("paramserver.coordinator")

_RETRY_S = 0.3
_SAY_S = 5.0
_RESTORE_S = 600.0
# Of the trouble that keeps the job from going back.
_KEY = "going back"


class _Job(ports.Stage, ports.Course, ports.Commands, ports.Ends, Protocol):
    agreeing: Agreeing
    registered: Registered
    checkpoints: Checkpoints
    ending: Ending
    journal: Journal
    keeping: Keeping
    leasing: Leasing
    loads: Loads
    mode_change: ModeChange
    poison: PoisonWatch
    promises: Promises
    registry: ModelRegistry
    reports: Reports
    schedule: Schedule

    @property
    def replication(self) -> ports.Replicating: ...

    @property
    def resizing(self) -> ports.Resizing: ...

    @property
    def given_up(self) -> bool: ...

    def missing(self) -> str: ...

    def write_down(self) -> None: ...


class Recovery:
    """Rolls the job back, once at a time: performs what `core/procedures/rollback.py` decides."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._rollback = Rollback(job.options.max_idle_s)
        self._choosing = Choosing(job)
        self._started = 0.0
        # Asynchronous mode: the leases with which the job goes on.
        self._table: SliceLeases | None = None

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self._rollback.restore(record.rollbacks, record.steps_redone)

    @property
    def count(self) -> int:
        """How often the job went back."""
        return self._rollback.count

    @property
    def steps_redone(self) -> int:
        """The steps that were done again, since the job went back."""
        return self._rollback.steps_redone

    @property
    def under_way(self) -> bool:
        """Whether the job is going back just now."""
        return self._rollback.under_way

    @property
    def resuming(self) -> bool:
        """Whether a new job is about to go on from a checkpoint."""
        return self._rollback.resuming

    @property
    def possible(self) -> bool:
        """Whether the job can go on should a shard be lost: from a checkpoint, or with version 0 uploaded again."""
        job = self._job
        if job.registry.model is None:
            return False
        return job.checkpoints.place is not None or not (job.registry.ready or job.loads.under_way)

    def begin(self, reason: str) -> None:
        """Go back, for example since a shard is gone, and another server has come in its place."""
        job = self._job
        command = self._rollback.handle(Reason(job.reports.newest_version()), time.monotonic())
        if command is None:  # it is under way
            return
        how = "goes back to a checkpoint" if job.registry.ready else "begins again with version 0"
        log.warning(f"the job {how}", reason=reason)
        if job.loads.under_way is not None:  # the weights before the load are published, and in a checkpoint
            job.registry.load_undone()
        job.loads.abandon()
        job.resizing.abandon()
        job.life.handle(GoesBack(reason, job.registry.ready))
        job.tasks.begin(self._run(command))

    def resume(self, saved: Manifest, place: str = "") -> None:
        """Let a new job go on from a checkpoint: take over the model now, the rest when all servers are there.

        ``place``: the place of that checkpoint, if it is not the place of the job's own.
        """
        job = self._job
        self._choosing.told(place, saved)
        if not place:
            job.checkpoints.restore(saved.name)
        where = position_of(saved)
        job.registry.adopt(model_of(saved), saved.layout_digest)
        job.schedule.restore(where)
        job.life.restore(max(job.timeline, saved.timeline))
        command = self._rollback.handle(Resumes(), time.monotonic())
        assert command is not None, "a job resumes before anything else"
        job.tasks.begin(self._run(command))

    async def _run(self, first: Command) -> None:
        """Perform one command after the other."""
        job = self._job
        command: Command | None = first
        try:
            while command is not None and not job.given_up:
                if isinstance(command, (GiveUp, StepDown)):
                    await self._end(command)
                    return
                command = self._rollback.handle(await self._perform(command), time.monotonic())
        except Exception as error:  # the top of a task: a job that waits for it must not wait for ever
            log.exception("going back failed")
            await job.fail(f"the job cannot go back to a checkpoint: {error}")
            return
        job.keeping.wake()  # members may have come or gone meanwhile
        job.replication.look()
        if job.life.phase is Phase.RUNNING:
            job.mode_change.bring_back()

    async def _perform(self, command: Command) -> Event:
        match command:
            case EndOld(again):
                await self._end_old(again)
            case AwaitServers(after_failure):
                await asyncio.sleep(_RETRY_S if after_failure else 0.0)
                await self._servers_there()
            case GoOn(version, redone):
                self._say(version, redone)
                await self._go_on(version)
            case _:
                return await self._attempt(command)
        return Done()

    async def _attempt(self, command: Command) -> Event:
        """Perform a command that may fail and be tried again."""
        try:
            match command:
                case Ask():
                    return await self._ask()
                case BeginTimeline(heard, version):
                    await self._begin_timeline(heard, version)
                case Restore(saved):
                    await self._restore(saved)
                case SetUp():
                    await self._set_up()
        except errors.RolledBackError as error:
            log.info(f"a server is on another timeline; trying again: {error}")
            return Failed(Kind.STRAYED, str(error))
        except errors.FencedError as error:
            return Failed(Kind.REPLACED, str(error))
        except errors.CheckpointError as error:
            if isinstance(command, Restore) and await asyncio.to_thread(self._choosing.gone, command.saved):
                return self._later(f"{error}: put the checkpoint back, or mount the volume again")
            log.warning("a checkpoint cannot be used", reason=str(error))
            return Failed(Kind.DAMAGED, str(error))
        except errors.RetryableError as error:
            return self._later(str(error))
        except errors.ParamServerError as error:
            return Failed(Kind.FOR_GOOD, str(error))
        return Done()

    def _later(self, text: str) -> Failed:
        """The same may work later. It is said when it is new; `status` shows it until the job goes on."""
        troubles = self._job.promises.troubles
        if troubles.get(_KEY) != text:
            troubles[_KEY] = text
            log.info(f"going back did not work at once; trying again: {text}")
        return Failed(Kind.LATER, text)

    async def _end(self, command: GiveUp | StepDown) -> None:
        if isinstance(command, StepDown):
            await self._job.replaced(command.reason)
        else:
            await self._job.fail(f"the job cannot go back to a checkpoint: {command.reason}")

    async def _end_old(self, again: bool) -> None:
        """End all that goes on of the old timeline."""
        job = self._job
        if again:
            job.life.handle(GoesBack("another server has begun anew", job.registry.ready))
        self._started = time.monotonic()
        await job.refresh()
        await job.checkpoints.rolled_back()
        await job.mode_change.close()
        await job.leasing.begin(None)

    def _say(self, version: int, redone: int | None) -> None:
        job = self._job
        if redone is None:
            log.info(f"the job goes on from version {version}, on timeline {job.timeline}")
            return
        job.ending.undone(max(version, 0), self._rollback.reached)
        redo = f"{redone} steps are done again" if version >= 0 else "it begins from the start"
        log.warning(
            f"the job went back to version {max(version, 0)} on timeline {job.timeline}; {redo}",
            after_s=round(time.monotonic() - self._started, 2),
        )

    async def _servers_there(self) -> None:
        """Wait until every index has a server; the watch gives the job up if that takes too long."""
        job, said = self._job, time.monotonic()
        while not job.seats.all_there(job.options.servers):
            await job.changes.wait(time.monotonic() + _RETRY_S)
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                log.info(f"waiting for {job.missing() or 'servers'}, to go on with all shards")

    async def _ask(self) -> Told:
        """Ask all shards for timelines and versions, and look for checkpoints."""
        job, place = self._job, self._job.checkpoints.place
        published = job.registry.ready
        saved: list[Saved] = []
        if place is not None and (published or self.resuming):
            saved = await asyncio.to_thread(self._choosing.look, place, self._rollback.bad, self.resuming)
        await job.registry.place()
        stats = await job.shards.stats()
        reached = max([0, *(reply.version for reply in stats if reply.timeline == job.timeline)])
        timelines = tuple(reply.timeline for reply in stats)
        return Told(reached, timelines, published, tuple(saved), str(place) if place is not None else "")

    async def _begin_timeline(self, heard: tuple[int, ...], version: int) -> None:
        """Begin a timeline, and write its number down."""
        job = self._job
        reach("coord.before_timeline")
        job.life.begin_timeline(*heard)
        job.registry.withdraw()
        job.replication.pause(stay=False)
        job.checkpoints.new_timeline(version)
        await job.checkpoints.rolled_back()
        job.write_down()
        await job.journal.settled()
        reach("coord.after_timeline")

    async def _restore(self, chosen: Saved) -> None:
        """All shards restore a checkpoint, and publish it."""
        job, saved = self._job, self._choosing.found[chosen.name]
        await self._load(saved, self._choosing.source if chosen.elsewhere else "")
        await job.registry.publish()
        if chosen.elsewhere:
            await job.checkpoints.save_first(saved.version)
        if self.resuming:
            job.reports.resumed(min(reply.samples for reply in await job.shards.stats()))
        self._table = await lease_table(job)

    async def _load(self, saved: Manifest, place: str) -> None:
        job = self._job
        where = position_of(saved)
        # Under a revision that no worker has heard of.
        consistency = replace(consistency_from_proto(where.view.consistency), revision=job.mode_change.next_revision())
        text = manifest.encode(saved).decode()

        def request(shard: int) -> shard_pb2.RestoreRequest:
            configure = job.registry.configuration(shard)
            configure.consistency.CopyFrom(consistency_to_proto(consistency))
            return shard_pb2.RestoreRequest(configure=configure, manifest=text, grant=job.registry.grant, place=place)

        restored = await job.shards.ask("Shard.Restore", request, shard_pb2.RestoreResponse, _RESTORE_S)
        if any(reply.version != saved.version for reply in restored):
            raise errors.CheckpointError(f"the servers did not all restore version {saved.version}")
        job.life.agree(consistency)
        job.loads.restore(where.loaded)
        job.poison.skip(where.poisoned)
        job.agreeing.restore(where.agreed)
        job.agreeing.went_back(job.timeline, saved.version)
        job.registered.went_back(where.registered, saved.name, place)
        job.schedule.restore(where)

    async def _set_up(self) -> None:
        """Version 0 was not published: set all servers up, so that a worker can upload it again."""
        job, self._table = self._job, None
        job.registered.went_back(None)

        def request(shard: int) -> shard_pb2.ConfigureRequest:
            configure = job.registry.configuration(shard)
            configure.anew = True
            return configure

        await job.shards.ask("Shard.Configure", request, shard_pb2.ConfigureResponse)

    async def _go_on(self, version: int) -> None:
        """All servers have ``version``: let the workers follow."""
        job = self._job
        job.reopen_mode_change()
        job.registry.restored(published=version >= 0)
        await job.leasing.begin(self._table)
        if version >= 0:
            job.replication.begin()
        job.life.handle(WentBack())
        job.promises.troubles.pop(_KEY, None)
        # A coordinator that found the job on its way back would go back once more. Workers must not be ahead of that.
        job.write_down()
        await job.journal.settled()
        # Servers know the workers since they restored. They hear separately of those that came or went meanwhile.
        await job.refresh()
