"""The checkpoints of a job. When all shards have written their copy of a version, its manifest is written last.

`core/procedures/checkpointing.py` decides what becomes of a version; here it is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.manifest import Manifest, checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.coordinator import ports
from paramserver.coordinator.history.best import BestCheckpoints
from paramserver.coordinator.history.cuts import Cuts
from paramserver.coordinator.history.overdue import Overdue
from paramserver.coordinator.history.sweeping import Sweep as Sweeping
from paramserver.coordinator.options import CheckpointOptions
from paramserver.coordinator.promises import Promises
from paramserver.coordinator.reports import Reports
from paramserver.core.job.life import Phase
from paramserver.core.procedures.checkpointing import (
    Announce,
    Checkpointing,
    Command,
    Copy,
    Event,
    GiveUp,
    NotCopied,
    NotWritten,
    Part,
    Prune,
    Release,
    Reported,
    SayChanged,
    SayLost,
    Sweep,
    Told,
    WriteManifest,
    Written,
)
from paramserver.failpoints import reach
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")

_LOST_S = 1.0
_COPIES = {
    shard_pb2.COPY_STATE_SAVED: Copy.SAVED,
    shard_pb2.COPY_STATE_FAILED: Copy.FAILED,
    shard_pb2.COPY_STATE_SKIPPED: Copy.SKIPPED,
}


class _Job(ports.Stage, ports.Commands, ports.Holding, Protocol):
    confirm: Callable[[], Awaitable[None]]
    promises: Promises
    reports: Reports

    @property
    def registered(self) -> ports.KeepingRegistered: ...

    def manifest(self, version: int, parts: Sequence[shard_pb2.CopyStatus]) -> Manifest: ...

    def write_down(self) -> None: ...


class Checkpoints:
    """The checkpoints of one job, on its present timeline."""

    def __init__(self, job: _Job, options: CheckpointOptions) -> None:
        self.options = options
        self.place = Place(options.place) if options.place else None
        # Name of the newest complete checkpoint; empty: none.
        self.last = ""
        self._job = job
        self.overdue = Overdue(job.promises, str(self.place), options.private)
        self._machine = Checkpointing()
        self._changed = asyncio.Condition()
        # The version that was given up last, and why.
        self._said = -1, ""
        self._cuts = Cuts(job, self, options)
        self.best = BestCheckpoints(job, self.place, options, self.cut)
        self._sweep = Sweeping(job, job.tasks, self.place, options.holding, self._given_up, self._cuts.lock)

    def restore(self, name: str) -> None:
        """Go on with this newest checkpoint of an earlier coordinator or run; empty: there is none."""
        self.last = name

    def completed(self, names: Sequence[str]) -> None:
        """Earlier coordinators have completed these checkpoints of this timeline: they are not saved again."""
        self._core.found([catalog.order(name)[1] for name in names])
        self.last = max(filter(None, (self.last, *names)), key=catalog.order, default="")

    def new_timeline(self, version: int) -> None:
        """The job goes on from ``version``, on another timeline."""
        self.overdue.forget()
        self._cuts.restart(version)
        self.best.undone(version)

    @property
    def _core(self) -> Checkpointing:
        """The state machine of checkpoints. It begins anew if the job has gone on to another timeline."""
        if self._machine.timeline != self._job.timeline:
            self._machine.begin(self._job.timeline)
        return self._machine

    # ---- copies of servers

    def hear(self, shard: int, stats: shard_pb2.StatsResponse) -> None:
        """A shard reports."""
        if self.place is None:
            return
        job, parts = self._job, [_part(status) for status in stats.copies]
        for part in parts:
            if part.timeline == job.timeline and not self._core.settled(part.version):
                self.overdue.begun(part.version)
        newest = stats.version if stats.timeline == job.timeline else -1
        for command in self._core.handle(Reported(shard, parts, len(job.holders), job.consistency.revision, newest)):
            job.tasks.begin(self._run(job.timeline, command))
        self.look()

    async def _run(self, timeline: int, *commands: Command) -> None:
        """Perform these commands, and those that follow from how they end."""
        left = deque(commands)
        while left:
            event = await self._perform(timeline, left.popleft())
            if event is not None:
                left.extend(self._core.handle(event))

    async def _perform(self, timeline: int, command: Command) -> Event | None:
        match command:
            case WriteManifest(version, parts):
                return await self._write(timeline, version, parts)
            case Announce(version, nbytes):
                self._announce(checkpoint_name(version, timeline), version, nbytes)
                await self.best.saved(timeline, version)
            case GiveUp(version):
                await self._give_up(timeline, command)
                return Told(timeline, version)
            case SayChanged(version):
                log.warning(f"no checkpoint of version {version}: the mode or the staleness changed meanwhile")
            case SayLost(version, shard):
                log.info(f"no checkpoint of version {version}: {self._server(shard)} has no copy of it")
            case Release(versions):
                async with self._changed:
                    self._changed.notify_all()
                await self._release(timeline, versions)
            case Prune(versions):
                await self._prune({checkpoint_name(version, timeline) for version in versions})
            case Sweep(version):
                self._sweep.begin(version)
        return None

    async def _write(self, timeline: int, version: int, parts: Sequence[Part]) -> Written | NotWritten:
        """Write the manifest, since all shards have written their copies: this makes them a checkpoint."""
        job, place = self._job, self.place
        assert place is not None
        left = NotWritten(timeline, version, "the job has gone on to another timeline")
        if timeline != job.timeline:
            return left
        try:
            await job.registered.save(place, timeline, version)
            manifest = job.manifest(
                version, [part.facts for part in parts if isinstance(part.facts, shard_pb2.CopyStatus)]
            )
            await job.confirm()
            if self.options.holding is not None:
                await asyncio.to_thread(self.options.holding.check)
            if timeline != job.timeline:
                return left
            await asyncio.to_thread(catalog.write_manifest, place, manifest)
        except (errors.ParamServerError, OSError) as error:
            return NotWritten(timeline, version, str(error))
        if timeline == job.timeline:
            reach("ckpt.pointer", version)
        return Written(timeline, version, manifest.nbytes)

    def _announce(self, name: str, version: int, nbytes: int) -> None:
        self.last = max(filter(None, (self.last, name)), key=catalog.order)
        self._cuts.took(self.overdue.took(version))
        self.overdue.saved(version)
        self._job.write_down()
        tell = log.debug if self.options.sparing and not self.options.every else log.info
        tell("checkpoint", version=version, saved=name, MB=round(nbytes / 1e6, 1))

    async def _prune(self, kept: set[str]) -> None:
        assert self.place is not None
        try:
            protected = kept | await self.best.kept()
            gone = await asyncio.to_thread(catalog.prune, self.place, self.options.keep, protected, self.options.ours)
            self.best.removed(gone)
        except (errors.ParamServerError, OSError) as error:
            log.warning("old checkpoints could not be removed", error=str(error))

    async def _give_up(self, timeline: int, command: GiveUp) -> None:
        if timeline != self._job.timeline:
            return
        reason = command.reason
        if command.shard >= 0:
            reason = f"{self._server(command.shard)}: {reason}"
        self.overdue.failed(command.version, reason)
        await self._look_at_last()
        if (command.version, reason) == self._said:  # the last version is tried again for some seconds
            return
        self._said = command.version, reason
        log.error(
            f"no checkpoint of version {command.version}: {reason}",
            saved=checkpoint_name(command.version, timeline),
            newest=self.last or "none",
        )

    def _server(self, shard: int) -> str:
        return f"server-{self._job.holders.primaries[shard]}"

    async def _look_at_last(self) -> None:
        """Find the newest checkpoint again, if it is gone together with its place."""
        place = self.place
        try:
            if place is not None and self.last and not await asyncio.to_thread(catalog.exists, place, self.last):
                left = await asyncio.to_thread(catalog.complete, place, self.options.ours)
                self.last = left[0].name if left else ""
        except errors.CheckpointError as error:
            log.debug("the newest checkpoint cannot be looked at", error=str(error))

    def _given_up(self, version: int) -> bool:
        return self._core.gave_up(version)

    async def sweep(self, version: int) -> None:
        """Return when no file is left of a version that was given up; see `Sweep.finish`."""
        await self._sweep.finish(version)

    async def _release(self, timeline: int, versions: Sequence[int]) -> None:
        job = self._job
        request = shard_pb2.ReleaseRequest(job=job.options.job, timeline=timeline, term=job.term, versions=versions)
        try:
            await job.shards.ask("Shard.Release", request, shard_pb2.ReleaseResponse, present=True)
        except errors.ParamServerError as error:
            # A server that did not hear of it still names the copy in its next report.
            log.debug("release", error=str(error))

    # ---- asking for a checkpoint

    @property
    def cutting(self) -> bool:
        """Whether servers are just now told which version to copy."""
        return self._cuts.lock.locked()

    def possible(self, version: int) -> int:
        """The first version from ``version`` on that may be saved: compression leaves nothing out for this one."""
        return self._cuts.possible(version)

    def look(self) -> None:
        """Warn of a checkpoint that is overdue, and begin one that is due."""
        self.overdue.look()
        self._cuts.look()

    async def begin(self) -> int:
        """Have all shards copy a version, in synchronous mode one of the next; return it. Raises as :meth:`cut`."""
        return await self._cuts.begin()

    async def cut(self) -> int:
        """Have all shards copy the version at which they stand, and return it; see `Cuts.cut`."""
        return await self._cuts.cut(ahead=False)

    def copied_anew(self, version: int) -> None:
        """All shards are about to be asked for a copy of this version, which may have been given up before."""
        self._core.try_again(version, 0.0)

    async def not_copied(self, timeline: int, version: int) -> None:
        """Not all shards copy this version: no server keeps what it has of it."""
        await self._run(timeline, *self._core.handle(NotCopied(timeline, version)))

    async def wait_settled(self, version: int) -> bool:
        """Wait until the checkpoint of ``version`` is complete (True) or given up.

        Raises RolledBackError, and UnavailableError if a server has let go of its copy meanwhile.
        """
        timeline = self._job.timeline
        while True:
            try:
                async with asyncio.timeout(_LOST_S), self._changed:
                    await self._changed.wait_for(lambda: self._core.settled(version) or self._gone(timeline))
                break
            except TimeoutError:
                if not await self._kept(version) and not self._core.settled(version):
                    raise errors.UnavailableError(f"a copy of version {version} was let go") from None
        self.check(timeline)
        return self._core.saved(version)

    async def _kept(self, version: int) -> bool:
        """Whether every server has a copy of ``version``. A version that is not settled needs all of them."""
        if self._core.settling(version):
            return True
        try:
            replies = await self._job.shards.stats()
        except errors.ParamServerError:  # if that server is dead, the job goes back
            return True
        return all(any(copy.version == version for copy in reply.copies) for reply in replies)

    async def save_first(self, version: int) -> None:
        """Save the version with which the job goes on, before a worker computes: the job has no own checkpoint yet.

        Raises JobFailedError if that cannot be done, and what :meth:`wait_settled` raises.
        """
        await self._cuts.copy(version)
        if not await self.wait_settled(version) and not self.options.private:
            await self.sweep(version)
            raise errors.JobFailedError(self.first_missing())

    def first_missing(self) -> str:
        """Why the job cannot begin: its first checkpoint is missing."""
        return (
            f"the first checkpoint could not be written to {self.place} ({self.overdue.reason or 'not written'}), and "
            "nothing has been trained: make room there, or mend it, or choose another directory with --checkpoint-dir"
        )

    def safe(self, version: int) -> bool:
        """Whether a checkpoint of ``version`` or a later one is complete."""
        return self._core.safe(version)

    def saved(self, version: int) -> bool:
        """Whether ``version`` is a checkpoint of this timeline."""
        return self._core.saved(version)

    def given_up(self) -> list[int]:
        """Versions of this timeline that will not be checkpoints."""
        return self._core.given_up()

    def try_again(self, version: int, after_s: float) -> bool:
        """Let a version that was given up be copied once more, if it failed for a reason that passes in time.

        ``after_s``: for how long the caller has tried.
        """
        return self._core.try_again(version, after_s)

    async def rolled_back(self) -> None:
        """Wake all that waits for a checkpoint of the old timeline: it will not come."""
        async with self._changed:
            self._changed.notify_all()

    def _gone(self, timeline: int) -> bool:
        return timeline != self._job.timeline or self._job.life.phase is Phase.RECOVERING

    def check(self, timeline: int) -> None:
        """Raise RolledBackError if the job goes back, or has left this timeline."""
        if self._gone(timeline):
            raise errors.RolledBackError("the job goes back to a checkpoint")


def _part(status: shard_pb2.CopyStatus) -> Part:
    copy = _COPIES.get(status.state, Copy.WRITING)
    return Part(status.timeline, status.version, copy, status.revision, status.reason, status)
