"""Having all shards copy one version for a checkpoint, and when that is due.

`core/procedures/cutting.py` decides what is done when; here it is done.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.pacing import Pacing
from paramserver.coordinator.options import CheckpointOptions
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.work.shards import one_version, same_slices
from paramserver.core.job.life import Phase
from paramserver.core.procedures.cutting import (
    Answered,
    Ask,
    Command,
    Compare,
    Compared,
    Copy,
    Cutting,
    Done,
    End,
    Event,
    Failed,
    GiveUp,
    Hold,
    LetGo,
    TakeBack,
    Told,
)
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02
_RETRY_S = 0.2
_CUT_S = 120.0
# While workers are held back. A slice that they have begun has to end within this time.
_HELD_S = 20.0


class Versions(Protocol):
    """The part of the job that knows which copied versions are checkpoints (`coordinator.history.checkpoints`)."""

    def saved(self, version: int) -> bool:
        """Whether the version is a checkpoint."""

    def copied_anew(self, version: int) -> None:
        """All shards are about to be asked for a copy of this version, which may have been given up before."""

    async def not_copied(self, timeline: int, version: int) -> None:
        """Not all shards copy this version."""

    def check(self, timeline: int) -> None:
        """Raise RolledBackError if the job has left this timeline."""


class _Job(ports.Stage, ports.Commands, Protocol):
    reports: Reports

    @property
    def registered(self) -> ports.KeepingRegistered: ...


class Cuts:
    """Has all shards copy one version, one version at a time."""

    def __init__(self, job: _Job, versions: Versions, options: CheckpointOptions) -> None:
        # Held while servers are told which version to copy.
        self.lock = asyncio.Lock()
        self._job, self._versions = job, versions
        self._pacing = Pacing(options)
        # For how long workers were held back for the last cut.
        self._held_s = 0.0

    def restart(self, version: int) -> None:
        """The job goes on from ``version``, on another timeline."""
        self._pacing.restart(version)

    def took(self, seconds: float) -> None:
        """A checkpoint was written in so many seconds; in asynchronous mode workers may have waited before that."""
        self._pacing.took(seconds + self._held_s)

    def possible(self, version: int) -> int:
        """The first version from ``version`` on that may be saved: compression leaves nothing out for this one."""
        return self._pacing.possible(version)

    def look(self) -> None:
        """Begin a checkpoint that is due."""
        job = self._job
        if job.life.phase is not Phase.RUNNING or self.lock.locked():
            return
        reached = job.reports.newest_version()
        if self._pacing.due(reached, job.consistency.mode):
            self._pacing.begun(reached)
            job.tasks.begin(self._quietly())

    async def begin(self) -> int:
        """Have all shards copy a version, in synchronous mode one of the next; return it. Raises as :meth:`cut`."""
        version = await self.cut(ahead=self._job.consistency.mode is Mode.SYNC)
        self._pacing.begun(version)
        return version

    async def _quietly(self) -> None:
        try:
            await self.begin()
        except errors.ParamServerError as error:
            log.warning("no checkpoint could be made now; training goes on", error=str(error))

    async def cut(self, ahead: bool) -> int:
        """Have all shards copy the same version, and return it. In asynchronous mode workers wait meanwhile.

        ``ahead``: synchronous shards copy a version that none of them has made, when they make it. Raises
        DeadlineError if no version can be named or the shards do not come to stand at the same version,
        RolledBackError if a shard is lost.
        """
        timeline = self._job.timeline
        async with self.lock:
            hold = self._job.consistency.mode is Mode.ASYNC
            limit_s, multiple = _HELD_S if hold else _CUT_S, self._pacing.possible(1)
            begun = time.monotonic()
            cutting = Cutting(ahead and not hold, hold, begun, limit_s, multiple)
            while True:
                match cutting.command:
                    case End(version):
                        self._held_s = time.monotonic() - begun if hold else 0.0
                        return version
                    case GiveUp(error):
                        raise error
                    case command:
                        if ahead and isinstance(command, Copy):
                            self._job.registered.named(command.version)
                        cutting.handle(await self._attempt(timeline, command), time.monotonic())

    async def _attempt(self, timeline: int, command: Command) -> Event:
        try:
            return await self._perform(timeline, command)
        except BaseException as error:  # also if this task is cancelled: shards may be told to wait
            return Failed(error)

    async def _perform(self, timeline: int, command: Command) -> Event:
        job = self._job
        match command:
            case Hold():
                await self._tell(timeline, shard_pb2.CutRequest.STEP_HOLD)
            case Ask(again):
                await asyncio.sleep(_LOOK_S if again else 0.0)
                self._versions.check(timeline)
                stats = await job.shards.stats()
                newest = max(one.version for one in stats)
                return Told([one.version for one in stats], one_version(stats), self._versions.saved(newest))
            case Compare():
                return Compared(await same_slices(job))
            case Copy(version):
                self._versions.copied_anew(version)
                replies = await self._tell(timeline, shard_pb2.CutRequest.STEP_COPY, version)
                taken = sum(reply.taken for reply in replies)
                return Answered(taken, len(replies) - taken)
            case TakeBack(version):
                work = self._versions.not_copied(timeline, version)
                await asyncio.shield(job.tasks.begin(work, awaited=True))
            case LetGo():
                await asyncio.shield(job.tasks.begin(self._let_go(timeline), awaited=True))
        return Done()

    async def _let_go(self, timeline: int) -> None:
        while timeline == self._job.timeline and self._job.life.phase is Phase.RUNNING:
            try:
                await self._tell(timeline, shard_pb2.CutRequest.STEP_LET_GO)
                return
            except errors.FencedError:
                return
            except errors.ParamServerError:
                await asyncio.sleep(_RETRY_S)

    async def copy(self, version: int) -> None:
        """Have all shards copy this version, at which they stand since the job went on with it."""
        await self._tell(self._job.timeline, shard_pb2.CutRequest.STEP_COPY, version)

    async def _tell(
        self, timeline: int, step: shard_pb2.CutRequest.Step, version: int = 0
    ) -> list[shard_pb2.CutResponse]:
        job = self._job
        request = shard_pb2.CutRequest(
            job=job.options.job, timeline=timeline, term=job.term, step=step, version=version
        )
        # A server that is missing must not keep the others from going on.
        present = step == shard_pb2.CutRequest.STEP_LET_GO
        return await job.shards.ask("Shard.Cut", request, shard_pb2.CutResponse, present=present)
