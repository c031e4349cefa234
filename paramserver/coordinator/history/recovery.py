"""Going back to a checkpoint: when a server has begun anew, all shards restore a checkpoint, on a new timeline.

The number of a timeline is written down before it is used, so that no number is used twice. Each attempt has a timeline
of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog, manifest, owner
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.loads import Loads
from paramserver.coordinator.history.manifests import load_from_proto, model_of, position_of
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.watching.ending import Ending
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.coordinator.work.schedule import Schedule
from paramserver.coordinator.work.shards import lease_table
from paramserver.core.job.life import GoesBack, Phase, WentBack
from paramserver.core.work.leases import SliceLeases
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import (
    consistency_from_proto,
    consistency_to_proto,
)

log = structlog.get_logger("paramserver.coordinator")

_RETRY_S = 0.3
_SAY_S = 5.0
_RESTORE_S = 600.0


class _Job(ports.Stage, ports.Course, ports.Commands, ports.Ends, Protocol):
    checkpoints: Checkpoints
    ending: Ending
    journal: Journal
    keeping: Keeping
    leasing: Leasing
    loads: Loads
    mode_change: ModeChange
    poison: PoisonWatch
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
    """Rolls the job back, once at a time. If another server begins anew meanwhile, there is another attempt."""

    def __init__(self, job: _Job) -> None:
        self.count = 0
        self.steps_redone = 0
        self._job = job
        self._bad: set[str] = set()
        # Whether there was another reason to go back since the present attempt began.
        self._again = False
        # Whether a new job is about to go on from a checkpoint; and whether the job is going back just now.
        self.resuming = False
        self.under_way = False
        # The checkpoint that the job was told to go on from, and its place, until the job has a checkpoint of its own.
        self._source: tuple[str, Manifest] | None = None
        self._started = 0.0
        # The newest version that was reported before the job went back.
        self._reached = 0
        # Asynchronous mode: the leases with which the job goes on.
        self._table: SliceLeases | None = None

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self.count, self.steps_redone = record.rollbacks, record.steps_redone

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
        if self.under_way:
            self._again = True
            return
        how = "goes back to a checkpoint" if job.registry.ready else "begins again with version 0"
        log.warning(f"the job {how}", reason=reason)
        self._reached = job.reports.newest_version()
        if job.loads.under_way is not None:  # the weights before the load are published, and in a checkpoint
            job.registry.load_undone()
        job.loads.abandon()
        job.resizing.abandon()
        job.life.handle(GoesBack(reason, job.registry.ready))
        self.under_way = True
        job.tasks.begin(self._run())

    def resume(self, saved: Manifest, place: str = "") -> None:
        """Let a new job go on from a checkpoint: take over the model now, the rest when all servers are there.

        ``place``: the place of that checkpoint, if it is not the place of the job's own.
        """
        job = self._job
        self._source = (place, saved) if place else None
        if not place:
            job.checkpoints.restore(saved.name)
        where = position_of(saved)
        job.registry.adopt(model_of(saved), saved.layout_digest)
        job.schedule.restore(where)
        job.life.restore(max(job.timeline, saved.timeline))
        self.resuming = True
        self.under_way = True
        job.tasks.begin(self._run())

    async def _run(self) -> None:
        job = self._job
        try:
            while not job.given_up:
                await self._begin()
                version = await self._insist()
                if version is None:
                    return
                self._tell(version)
                await self._go_on(version)
                if not self._again:
                    break
                job.life.handle(GoesBack("another server has begun anew", version >= 0))
        except Exception as error:  # the top of a task: a job that waits for it must not wait for ever
            log.exception("going back failed")
            await job.fail(f"the job cannot go back to a checkpoint: {error}")
            return
        self.under_way = False
        job.keeping.wake()  # members may have come or gone meanwhile
        job.replication.wake()
        if job.life.phase is Phase.RUNNING:
            job.mode_change.bring_back()

    async def _begin(self) -> None:
        """End all that goes on of the old timeline."""
        job = self._job
        self._started = time.monotonic()
        await job.refresh()
        await job.checkpoints.rolled_back()
        await job.mode_change.close()
        await job.leasing.begin(None)

    async def _insist(self) -> int | None:
        """Attempt to go back until one attempt works, and return its version; None if the job is over."""
        job, since = self._job, time.monotonic()
        while not job.given_up:
            await self._servers_there()
            self._again = False
            try:
                version = await self._attempt()
            except errors.RolledBackError as error:
                log.info(f"a server is on another timeline; trying again: {error}")
                await asyncio.sleep(_RETRY_S)
            except errors.FencedError as error:
                await job.replaced(str(error))
                return None
            except errors.CheckpointError as error:
                log.warning("a checkpoint cannot be used; trying an earlier one", reason=str(error))
            except errors.RetryableError as error:
                log.info(f"going back did not work at once; trying again: {error}")
                limit_s = job.options.max_idle_s
                if time.monotonic() - since > limit_s:
                    await job.fail(
                        f"the job cannot go back to a checkpoint: it was tried for {limit_s:g} s (cluster.max_idle_s), "
                        f"the last time with: {error}"
                    )
                    return None
                await asyncio.sleep(_RETRY_S)
            except errors.ParamServerError as error:
                await job.fail(f"the job cannot go back to a checkpoint: {error}")
                return None
            else:
                if not self._again:
                    return version
        return None

    def _tell(self, version: int) -> None:
        job, resuming = self._job, self.resuming
        self.resuming = False
        if resuming:
            log.info(f"the job goes on from version {version}, on timeline {job.timeline}")
            return
        self.count += 1
        again = max(0, self._reached - version) if version >= 0 else 0
        self.steps_redone += again
        job.ending.undone(max(version, 0), self._reached)
        redo = f"{again} steps are done again" if version >= 0 else "it begins from the start"
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

    async def _attempt(self) -> int:
        """Begin a timeline; return the version that is published on it, or -1 if version 0 has to be uploaded again."""
        job = self._job
        place = job.checkpoints.place
        found: Manifest | None = None
        elsewhere = False
        if job.registry.ready or self.resuming:
            if place is None:  # version 0 was published just now
                raise errors.JobFailedError("a shard of the model is gone, and there is no checkpoint")
            found = self._fitting(await asyncio.to_thread(catalog.complete, place, job.options.checkpoints.ours))
            elsewhere = found is None and self._source is not None
            if elsewhere:
                found = self._fitting(await asyncio.to_thread(self._told))
            if found is None:
                raise errors.JobFailedError(f"there is no complete checkpoint of this job in {place}")
        await job.registry.place()
        stats = await job.shard_stats()
        self._reached = max([self._reached, *(reply.version for reply in stats if reply.timeline == job.timeline)])
        reach("coord.before_timeline")
        job.life.begin_timeline(*(reply.timeline for reply in stats), found.timeline if found else 0)
        job.registry.withdraw()
        job.replication.pause(stay=False)
        job.checkpoints.new_timeline(found.version if found else 0)
        await job.checkpoints.rolled_back()
        job.write_down()
        await job.journal.settled()
        reach("coord.after_timeline")
        if found is None:
            await self._configure_anew()
            self._table = None
            return -1
        try:
            await self._restore(found, self._source[0] if elsewhere and self._source else "")
        except errors.CheckpointError:
            self._bad.add(found.name)
            raise
        await job.registry.publish()
        if elsewhere:
            await job.checkpoints.save_first(found.version)
        if self.resuming:
            job.reports.resumed(min(reply.samples for reply in await job.shard_stats()))
        self._table = await lease_table(job)
        return found.version

    def _fitting(self, found: Sequence[Manifest]) -> Manifest | None:
        """The newest checkpoint of this model that is finite and not known to be damaged; None: there is none."""
        digest = self._job.registry.digest
        for saved in found:
            if not saved.finite or saved.name in self._bad or saved.layout_digest != digest:
                continue
            try:
                loaded = load_from_proto(position_of(saved).loaded)
            except errors.CheckpointError as error:
                log.warning("a checkpoint cannot be used; trying an earlier one", reason=str(error))
                self._bad.add(saved.name)
                continue
            # Workers that have gone on after a load do not load again.
            if self.resuming or not self._job.loads.lost(loaded):
                return saved
        return None

    def _told(self) -> list[Manifest]:
        """The checkpoint that the job was told to go on from, and older ones in its place."""
        assert self._source is not None
        place, meant = Place(self._source[0]), self._source[1]
        found = catalog.complete(place, owner.histories_in(place))
        return [saved for saved in found if catalog.order(saved.name) <= catalog.order(meant.name)]

    async def _restore(self, saved: Manifest, place: str) -> None:
        job = self._job
        where = position_of(saved)
        # Under a revision that no worker has heard of.
        consistency = replace(consistency_from_proto(where.view.consistency), revision=job.mode_change.next_revision())
        text = manifest.encode(saved).decode()

        def request(shard: int) -> shard_pb2.RestoreRequest:
            configure = job.registry.configuration(shard)
            configure.consistency.CopyFrom(consistency_to_proto(consistency))
            return shard_pb2.RestoreRequest(configure=configure, manifest=text, grant=job.registry.grant, place=place)

        restored = await job.ask_shards("Shard.Restore", request, shard_pb2.RestoreResponse, _RESTORE_S)
        if any(reply.version != saved.version for reply in restored):
            raise errors.CheckpointError(f"the servers did not all restore version {saved.version}")
        job.life.agree(consistency)
        job.loads.restore(where.loaded)
        job.poison.skip(where.poisoned)
        job.schedule.restore(where)

    async def _configure_anew(self) -> None:
        """Version 0 was not published: set all servers up, so that a worker can upload it again."""
        job = self._job

        def request(shard: int) -> shard_pb2.ConfigureRequest:
            configure = job.registry.configuration(shard)
            configure.anew = True
            return configure

        await job.ask_shards("Shard.Configure", request, shard_pb2.ConfigureResponse)

    async def _go_on(self, version: int) -> None:
        """All servers have ``version``: let the workers follow."""
        job = self._job
        job.reopen_mode_change()
        job.registry.restored(published=version >= 0)
        await job.leasing.begin(self._table)
        if version >= 0:
            job.replication.begin()
        job.life.handle(WentBack())
        await job.keeping.tell()
        await job.refresh()
