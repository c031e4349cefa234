"""The checkpoints of a job. When all shards have written their copy of a version, its manifest is written last."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.manifest import Manifest, checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.coordinator import ports
from paramserver.coordinator.history.overdue import Overdue
from paramserver.coordinator.history.pacing import Pacing
from paramserver.coordinator.history.sweeping import Sweep
from paramserver.coordinator.options import CheckpointOptions
from paramserver.coordinator.promises import Promises
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.work.shards import one_version, same_slices
from paramserver.core.job.life import Phase
from paramserver.core.versions.consistency import Mode
from paramserver.failpoints import reach
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02
_CUT_S = 120.0
_LOST_S = 1.0
# While workers are held back. A slice that they have begun has to end within this time.
_HELD_S = 20.0


class _Job(ports.Stage, ports.Commands, ports.Holding, Protocol):
    confirm: Callable[[], Awaitable[None]]
    promises: Promises
    reports: Reports

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
        # By version, and by index of the server: the state of its copy.
        self._heard: dict[int, dict[int, shard_pb2.CopyStatus]] = {}
        # Versions of this timeline that are complete (True) or never will be (False).
        self._settled: dict[int, bool] = {}
        self._settling: set[int] = set()
        # By version that was given up: for how many seconds a caller may try it again. Some server had no room for
        # another copy, or the mode changed meanwhile.
        self._again: dict[int, float] = {}
        self._changed = asyncio.Condition()
        self._cutting = asyncio.Lock()
        self._sweep = Sweep(job, job.tasks, self.place, options.holding, self._given_up, self._cutting)
        self._pacing = Pacing(options)

    def restore(self, name: str) -> None:
        """Go on with this newest checkpoint of an earlier coordinator or run; empty: there is none."""
        self.last = name

    def completed(self, names: Sequence[str]) -> None:
        """Earlier coordinators have completed these checkpoints of this timeline: they are not saved again."""
        self._settled |= {catalog.order(name)[1]: True for name in names}
        self.last = max(filter(None, (self.last, *names)), key=catalog.order, default="")

    def new_timeline(self, version: int) -> None:
        """The job goes on from ``version``, on another timeline."""
        self._heard.clear()
        self._settled.clear()
        self._settling.clear()
        self._again.clear()
        self.overdue.forget()
        self._pacing.restart(version)

    # ---- copies of servers

    def hear(self, shard: int, stats: shard_pb2.StatsResponse) -> None:
        """A shard reports."""
        if self.place is None:
            return
        again: list[int] = []
        for status in stats.copies:
            if status.timeline != self._job.timeline:
                continue
            if status.version in self._settled:
                # Also said of a copy that is still written: it may wait for a part that no process has any more.
                again.append(status.version)
                continue
            self._heard.setdefault(status.version, {})[shard] = status
            self.overdue.begun(status.version)
            self._judge(status.version)
        if again:
            self._job.tasks.begin(self._release(again))
        for version in again:  # a server began its copy after the version was given up
            if not self._settled[version]:
                self._sweep.begin(version)
        self.look()

    def _judge(self, version: int) -> None:
        if version in self._settled or version in self._settling:
            return
        told = self._heard[version]
        broken = [
            (index, status)
            for index, status in sorted(told.items())
            if status.state in (shard_pb2.COPY_STATE_FAILED, shard_pb2.COPY_STATE_SKIPPED)
        ]
        if broken:
            index, status = broken[0]
            self._settling.add(version)
            if all(status.state == shard_pb2.COPY_STATE_SKIPPED for _, status in broken):
                self._again[version] = math.inf
            self._job.tasks.begin(
                self._give_up(version, f"server-{self._job.holders.primaries[index]}: {status.reason or 'not written'}")
            )
        elif len(told) == len(self._job.holders) and all(
            status.state == shard_pb2.COPY_STATE_SAVED for status in told.values()
        ):
            self._settling.add(version)
            self._job.tasks.begin(self._complete(version, [told[index] for index in sorted(told)]))

    async def _complete(self, version: int, parts: Sequence[shard_pb2.CopyStatus]) -> None:
        """Write the manifest, since all shards have written their copies: this makes them a checkpoint."""
        job, timeline, place = self._job, self._job.timeline, self.place
        assert place is not None
        if any(part.revision != job.consistency.revision for part in parts):
            self._again[version] = _CUT_S
            await self._settle(version, False)
            log.warning(f"no checkpoint of version {version}: the mode or the staleness changed meanwhile")
            return
        try:
            manifest = job.manifest(version, parts)
            await job.confirm()
            if self.options.holding is not None:
                await asyncio.to_thread(self.options.holding.check)
            await asyncio.to_thread(catalog.write_manifest, place, manifest)
        except (errors.ParamServerError, OSError) as error:
            await self._give_up(version, str(error))
            return
        if timeline != job.timeline:
            return
        reach("ckpt.pointer", version)
        self.last = max(filter(None, (self.last, manifest.name)), key=catalog.order)
        self.overdue.saved(version)
        job.write_down()
        log.info("checkpoint", version=version, saved=manifest.name, MB=round(manifest.nbytes / 1e6, 1))
        # Copies of other versions may still be on their way.
        kept = {checkpoint_name(other, timeline) for other in (version, *self._heard, *self._settling)}
        await self._settle(version, True)
        try:
            await asyncio.to_thread(catalog.prune, place, self.options.keep, kept, self.options.ours)
        except (errors.ParamServerError, OSError) as error:
            log.warning("old checkpoints could not be removed", error=str(error))

    async def _give_up(self, version: int, reason: str) -> None:
        self.overdue.failed(version, reason)
        await self._look_at_last()
        log.error(
            f"no checkpoint of version {version}: {reason}",
            saved=checkpoint_name(version, self._job.timeline),
            newest=self.last or "none",
        )
        await self._settle(version, False)
        self._sweep.begin(version)

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
        return self._settled.get(version) is False

    async def sweep(self, version: int) -> None:
        """Return when no file is left of a version that was given up; see `Sweep.finish`."""
        await self._sweep.finish(version)

    async def _settle(self, version: int, good: bool) -> None:
        self._settled[version] = good
        self._settling.discard(version)
        stale = [other for other in self._heard if other <= version]
        for other in stale:
            del self._heard[other]
        async with self._changed:
            self._changed.notify_all()
        await self._release([version])

    async def _release(self, copies: Sequence[int]) -> None:
        job = self._job
        request = shard_pb2.ReleaseRequest(
            job=job.options.job, timeline=job.timeline, term=job.term, versions=list(copies)
        )
        try:
            await job.ask_shards("Shard.Release", request, shard_pb2.ReleaseResponse, present=True)
        except (
            errors.ParamServerError
        ) as error:  # a server that did not hear of it still names the copy in its next report
            log.debug("release", error=str(error))

    # ---- asking for a checkpoint

    @property
    def cutting(self) -> bool:
        """Whether servers are just now told which version to copy."""
        return self._cutting.locked()

    def possible(self, version: int) -> int:
        """The first version from ``version`` on that may be saved: compression leaves nothing out for this one."""
        return self._pacing.possible(version)

    def look(self) -> None:
        """Warn of a checkpoint that is overdue, and begin one that is due."""
        job = self._job
        self.overdue.look()
        if job.life.phase is not Phase.RUNNING or self._cutting.locked():
            return
        reached = job.reports.newest_version()
        if self._pacing.due(reached, job.consistency.mode):
            self._pacing.begun(reached)
            job.tasks.begin(self._cut_quietly())

    async def begin(self) -> int:
        """Have all shards copy a version, in synchronous mode one of the next; return it. Raises as :meth:`cut`."""
        ahead = self._job.consistency.mode is Mode.SYNC
        version = await (self._copy_ahead() if ahead else self.cut())
        self._pacing.begun(version)
        return version

    async def _cut_quietly(self) -> None:
        try:
            await self.begin()
        except errors.ParamServerError as error:
            log.warning("no checkpoint could be made now; training goes on", error=str(error))

    async def _copy_ahead(self) -> int:
        """Synchronous mode: have all shards copy a version that they have not made yet when they make it; return it.

        Raises DeadlineError if the shards are always faster than the request, RolledBackError if a shard is lost.
        """
        job, timeline, ahead = self._job, self._job.timeline, 1
        deadline = time.monotonic() + _CUT_S
        async with self._cutting:
            while time.monotonic() < deadline:
                self.check(timeline)
                reached = max(one.version for one in await job.shard_stats())
                version, replies = self._pacing.possible(reached + ahead), []
                try:
                    replies = await self._tell(timeline, shard_pb2.CutRequest.STEP_COPY, version)
                finally:
                    if not (replies and all(reply.taken for reply in replies)) and timeline == job.timeline:
                        await asyncio.shield(job.tasks.begin(self._forgo(version), awaited=True))
                if all(reply.taken for reply in replies):
                    return version
                ahead *= 4
            raise errors.DeadlineError(f"no version could be named in advance within {_CUT_S:g} s")

    async def _forgo(self, version: int) -> None:
        """Not all shards copy this version. If it is the last one, it is copied at the end."""
        self._again[version] = math.inf
        await self._settle(version, False)
        self._sweep.begin(version)

    async def cut(self) -> int:
        """Have all shards copy the same version, and return it. In asynchronous mode workers wait meanwhile.

        Raises DeadlineError if the shards do not come to stand at the same version, RolledBackError if a shard is lost.
        """
        job, timeline = self._job, self._job.timeline
        async with self._cutting:
            hold = job.consistency.mode is Mode.ASYNC
            try:
                if hold:
                    await self._tell(timeline, shard_pb2.CutRequest.STEP_HOLD)
                return await self._copy_all(timeline)
            finally:
                if hold and timeline == job.timeline:
                    await asyncio.shield(job.tasks.begin(self._let_go(timeline), awaited=True))

    async def _copy_all(self, timeline: int) -> int:
        job, last = self._job, -1
        limit_s = _HELD_S if job.consistency.mode is Mode.ASYNC else _CUT_S
        deadline = time.monotonic() + limit_s
        while True:
            self.check(timeline)
            stats = await job.shard_stats()
            version = stats[0].version if one_version(stats) else -1
            quiet, last = version == last, version
            if version >= 0 and (quiet or job.consistency.mode is Mode.SYNC):
                if self._settled.get(version):
                    return version
                if await same_slices(job):
                    replies = await self._tell(timeline, shard_pb2.CutRequest.STEP_COPY, version)
                    if all(reply.taken for reply in replies):
                        return version
                    if any(reply.taken for reply in replies):
                        await self._release([version])
            if time.monotonic() > deadline:
                raise errors.DeadlineError(f"the shards did not come to stand at one version within {limit_s:g} s")
            await asyncio.sleep(_LOOK_S)

    async def _let_go(self, timeline: int) -> None:
        while timeline == self._job.timeline and self._job.life.phase is Phase.RUNNING:
            try:
                await self._tell(timeline, shard_pb2.CutRequest.STEP_LET_GO)
                return
            except errors.FencedError:
                return
            except errors.ParamServerError:
                await asyncio.sleep(0.2)

    async def _tell(
        self, timeline: int, step: shard_pb2.CutRequest.Step, version: int = 0
    ) -> list[shard_pb2.CutResponse]:
        job = self._job
        request = shard_pb2.CutRequest(
            job=job.options.job, timeline=timeline, term=job.term, step=step, version=version
        )
        # A server that is missing must not keep the others from going on.
        present = step == shard_pb2.CutRequest.STEP_LET_GO
        return await job.ask_shards("Shard.Cut", request, shard_pb2.CutResponse, present=present)

    async def wait_settled(self, version: int) -> bool:
        """Wait until the checkpoint of ``version`` is complete (True) or given up.

        Raises RolledBackError, and UnavailableError if a server has let go of its copy meanwhile.
        """
        timeline = self._job.timeline
        while True:
            try:
                async with asyncio.timeout(_LOST_S), self._changed:
                    await self._changed.wait_for(lambda: version in self._settled or self._gone(timeline))
                break
            except TimeoutError:
                if not await self._kept(version) and version not in self._settled:
                    raise errors.UnavailableError(f"a copy of version {version} was let go") from None
        self.check(timeline)
        return self._settled[version]

    async def _kept(self, version: int) -> bool:
        """Whether every server has a copy of ``version``. A version that is not settled needs all of them."""
        if version in self._settling:
            return True
        try:
            replies = await self._job.shard_stats()
        except errors.ParamServerError:  # if that server is dead, the job goes back
            return True
        return all(any(copy.version == version for copy in reply.copies) for reply in replies)

    async def save_first(self, version: int) -> None:
        """Save the version with which the job goes on, before a worker computes: the job has no own checkpoint yet.

        Raises JobFailedError if that cannot be done, and what :meth:`wait_settled` raises.
        """
        await self._tell(self._job.timeline, shard_pb2.CutRequest.STEP_COPY, version)
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
        return any(good and done >= version for done, good in self._settled.items())

    def given_up(self) -> list[int]:
        """Versions of this timeline that will not be checkpoints."""
        return [version for version, good in self._settled.items() if not good]

    def try_again(self, version: int, after_s: float) -> bool:
        """Let a version that was given up be copied once more, if it failed for a reason that passes in time.

        ``after_s``: for how long the caller has tried.
        """
        may = after_s < self._again.pop(version, 0.0)
        if may:
            self._settled.pop(version, None)
        return may

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
