"""Which checkpoints there are: copies that all shards have written become one by its manifest, written last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast

import structlog
from google.protobuf import json_format

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.manifest import COPIES_KEPT, Manifest, checkpoint_name
from paramserver.checkpoint.owner import Holding
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import FileInfo
from paramserver.coordinator.counted import counted
from paramserver.core.consistency import Mode
from paramserver.failpoints import reach
from paramserver.transport.session import versions
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

if TYPE_CHECKING:
    from paramserver.coordinator.job import Job

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02
_CUT_S = 120.0
_LOST_S = 1.0
# While workers are held back; what they have begun takes one slice.
_HELD_S = 20.0


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """``place``: a directory or URL; empty: no checkpoints. ``every``: steps (asynchronous: slices); 0: only the first
    and the last version. ``keep``: how many are kept. ``run``: how the job was started, for who goes on with it.
    ``holding``: by what right the place is the job's; None: nobody else comes there.
    """

    place: str = ""
    every: int = 0
    keep: int = 3
    run: dict[str, Any] | None = None
    holding: Holding | None = None

    def ours(self, history: str) -> bool:
        """Whether checkpoints of this history are the job's."""
        return self.holding is None or self.holding.ours(history)


class Checkpoints:
    """The checkpoints of one job, on its present timeline."""

    def __init__(self, job: Job, options: CheckpointOptions) -> None:
        self.options = options
        self.place = Place(options.place) if options.place else None
        # The newest complete one.
        self.last = ""
        self._job = job
        # By version, what each server (by index) says of its copy.
        self._heard: dict[int, dict[int, shard_pb2.CopyStatus]] = {}
        # Versions of this timeline that are complete (True) or never will be (False).
        self._settled: dict[int, bool] = {}
        self._settling: set[int] = set()
        # Of those that never will be: some server had no room for another copy.
        self._skipped: set[int] = set()
        self._changed = asyncio.Condition()
        self._cutting = asyncio.Lock()
        self._next = options.every

    def new_timeline(self, version: int) -> None:
        """The job goes on from ``version``, on another timeline."""
        self._heard.clear()
        self._settled.clear()
        self._settling.clear()
        self._skipped.clear()
        self._next = (version // self.options.every + 1) * self.options.every if self.options.every else 0

    # ---- what servers say

    def hear(self, index: int, stats: shard_pb2.StatsResponse) -> None:
        """Server ``index`` reports."""
        if self.place is None:
            return
        again: list[int] = []
        for status in stats.copies:
            if status.timeline != self._job.timeline:
                continue
            if status.version in self._settled:
                # One that is still being written is told too: it may wait for a part that nobody has any more.
                again.append(status.version)
                continue
            self._heard.setdefault(status.version, {})[index] = status
            self._judge(status.version)
        if again:
            self._job.loosely(self._release(again))
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
                self._skipped.add(version)
            self._job.loosely(self._give_up(version, f"server-{index}: {status.reason or 'not written'}"))
        elif len(told) == self._job.options.servers and all(
            status.state == shard_pb2.COPY_STATE_SAVED for status in told.values()
        ):
            self._settling.add(version)
            self._job.loosely(self._complete(version, [told[index] for index in sorted(told)]))

    async def _complete(self, version: int, parts: Sequence[shard_pb2.CopyStatus]) -> None:
        """All shards have written theirs: the manifest makes it a checkpoint."""
        job, timeline, place = self._job, self._job.timeline, self.place
        assert place is not None
        if any(part.revision != job.consistency.revision for part in parts):
            await self._give_up(version, "the mode or the staleness changed meanwhile")
            return
        try:
            manifest = self._manifest(version, parts)
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
        job.journal.record(job)
        log.info("checkpoint", version=version, name=manifest.name, MB=round(manifest.nbytes / 1e6, 1))
        await self._settle(version, True)
        try:
            await asyncio.to_thread(catalog.prune, place, self.options.keep, [manifest.name], self.options.ours)
        except (errors.ParamServerError, OSError) as error:
            log.warning("old checkpoints could not be removed", error=str(error))

    async def _give_up(self, version: int, reason: str) -> None:
        log.warning(
            f"no checkpoint of version {version}: {reason}; training goes on, the one before stays",
            name=checkpoint_name(version, self._job.timeline),
        )
        await self._settle(version, False)

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
            await job.ask_servers("Shard.Release", request)
        except errors.ParamServerError as error:  # who has not heard says so in its next report
            log.debug("release", error=str(error))

    def _manifest(self, version: int, parts: Sequence[shard_pb2.CopyStatus]) -> Manifest:
        job = self._job
        model = job.registry.model
        assert model is not None
        here = versions()
        return Manifest(
            job=job.options.job,
            timeline=job.timeline,
            version=version,
            term=job.term,
            servers=job.options.servers,
            layout_digest=job.registry.digest,
            model=json_format.MessageToDict(model, preserving_proto_field_name=True),
            weights=tuple(_info(part.weights) for part in parts),
            state=tuple(_info(part.optimizer) for part in parts),
            position=json_format.MessageToDict(position(job), preserving_proto_field_name=True),
            run=dict(self.options.run or {}),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            paramserver=here["paramserver"],
            torch=here["torch"],
            finite=all(part.finite for part in parts),
        )

    # ---- asking for one

    def look(self) -> None:
        """Asynchronous mode: begin a checkpoint when it is due."""
        job = self._job
        due = self.place is not None and self.options.every and job.consistency.mode is Mode.ASYNC
        if not due or job.state != types_pb2.JOB_STATE_RUNNING or self._cutting.locked():
            return
        reached = job.board.newest_version()
        if reached >= self._next:
            self._next = (reached // self.options.every + 1) * self.options.every
            job.loosely(self._cut_quietly())

    async def _cut_quietly(self) -> None:
        try:
            version = await self.cut()
            self._next = max(self._next, (version // self.options.every + 1) * self.options.every)
        except errors.ParamServerError as error:
            log.warning("no checkpoint could be made now; training goes on", error=str(error))

    async def cut(self) -> int:
        """Have all shards copy one version, the same of each; returns it. Asynchronous: workers wait meanwhile.

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
                    await asyncio.shield(job.loosely(self._let_go(timeline)))

    async def _copy_all(self, timeline: int) -> int:
        job, last = self._job, -1
        limit_s = _HELD_S if job.consistency.mode is Mode.ASYNC else _CUT_S
        deadline = time.monotonic() + limit_s
        while True:
            self._check(timeline)
            stats = await job.server_stats()
            found = {reply.version for reply in stats}
            version = found.pop() if len(found) == 1 else -1
            quiet, last = version == last, version
            if version >= 0 and (quiet or job.consistency.mode is Mode.SYNC):
                if self._settled.get(version):
                    return version
                if await self._same_slices():
                    replies = await self._tell(timeline, shard_pb2.CutRequest.STEP_COPY, version)
                    if all(reply.taken for reply in replies):
                        return version
                    if any(reply.taken for reply in replies):
                        await self._release([version])
            if time.monotonic() > deadline:
                raise errors.DeadlineError(f"the shards did not come to stand at one version within {limit_s:g} s")
            await asyncio.sleep(_LOOK_S)

    async def _same_slices(self) -> bool:
        job = self._job
        if job.consistency.mode is Mode.SYNC:
            return True
        replies = await counted(job)
        return all(reply == replies[0] for reply in replies)

    async def _let_go(self, timeline: int) -> None:
        while timeline == self._job.timeline and self._job.state == types_pb2.JOB_STATE_RUNNING:
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
        return [cast(shard_pb2.CutResponse, reply) for reply in await job.ask_servers("Shard.Cut", request)]

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
        self._check(timeline)
        return self._settled[version]

    async def _kept(self, version: int) -> bool:
        """Whether every server has a copy of ``version``, as one that is not settled must."""
        if version in self._settling:
            return True
        try:
            replies = await self._job.server_stats()
        except errors.ParamServerError:  # if it is dead, the job goes back
            return True
        return all(any(copy.version == version for copy in reply.copies) for reply in replies)

    async def save_first(self, version: int) -> None:
        """Save the version with which the job goes on, before anybody computes: there is none of its own yet.

        Raises JobFailedError if that cannot be done, and what :meth:`wait_settled` raises.
        """
        await self._tell(self._job.timeline, shard_pb2.CutRequest.STEP_COPY, version)
        if not await self.wait_settled(version):
            raise errors.JobFailedError(f"the first checkpoint could not be written to {self.place}")

    async def make_safe(self, version: int) -> None:
        """Return when a checkpoint of ``version`` or a later one is complete, or cannot be had.

        Raises RolledBackError if the job goes back to an earlier one meanwhile.
        """
        timeline = self._job.timeline
        while self.place is not None:
            self._check(timeline)
            if any(good and done >= version for done, good in self._settled.items()):
                return
            try:
                if not await self._room():
                    await asyncio.sleep(_LOOK_S)
                    continue
                reached = await self.cut()
                if await self.wait_settled(reached):
                    return
            except errors.RolledBackError:
                raise
            except errors.RetryableError as error:
                log.info(f"the last checkpoint waits: {error}")
                await asyncio.sleep(0.2)
                continue
            if reached in self._skipped:  # there is room for it by and by
                self._settled.pop(reached, None)
                self._skipped.discard(reached)
            elif reached >= version:
                return

    async def _room(self) -> bool:
        """Whether no server would skip a copy now. A copy that one of them has already is waited for."""
        writing = [
            sum(copy.state != shard_pb2.COPY_STATE_SKIPPED for copy in reply.copies)
            for reply in await self._job.server_stats()
        ]
        return max(writing, default=COPIES_KEPT) < COPIES_KEPT  # no answer at all: not now

    async def rolled_back(self) -> None:
        """Nobody gets a checkpoint of the old timeline any more."""
        async with self._changed:
            self._changed.notify_all()

    def _gone(self, timeline: int) -> bool:
        return timeline != self._job.timeline or self._job.state == types_pb2.JOB_STATE_RECOVERING

    def _check(self, timeline: int) -> None:
        if self._gone(timeline):
            raise errors.RolledBackError("the job goes back to a checkpoint")


def position(job: Job) -> coordinator_pb2.JobRecord:
    """Where training stands beside the weights: how the data is cut and dealt out, mode, seed."""
    record = job.record()
    view = types_pb2.View(
        timeline=job.timeline,
        consistency=record.view.consistency,
        sync_origin=record.view.sync_origin,
        slices_per_step=record.view.slices_per_step,
        schedule_mode=record.view.schedule_mode,
    )
    return coordinator_pb2.JobRecord(
        view=view,
        settings=record.settings,
        expected_servers=record.expected_servers,
        expected_workers=record.expected_workers,
        data=record.data if record.HasField("data") else None,
        async_from=record.async_from,
        histories=record.histories[:1],
        poisoned=record.poisoned,
    )


def position_of(manifest: Manifest) -> coordinator_pb2.JobRecord:
    """The same from a manifest. Raises CheckpointError if it makes no sense."""
    try:
        return json_format.ParseDict(manifest.position, coordinator_pb2.JobRecord(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise errors.CheckpointError(f"the manifest of {manifest.name} does not say where training stands") from error


def model_of(manifest: Manifest) -> types_pb2.ModelSpec:
    """The model of a checkpoint. Raises CheckpointError if it makes no sense."""
    try:
        return json_format.ParseDict(manifest.model, types_pb2.ModelSpec(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise errors.CheckpointError(f"the manifest of {manifest.name} does not describe a model") from error


def _info(file: shard_pb2.SavedFile) -> FileInfo:
    return FileInfo(PurePath(file.name).name, file.bytes, file.sha256)
