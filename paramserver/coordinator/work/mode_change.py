"""Changing mode or staleness of a running job, at a version boundary that is the same on every shard.

The change is prepared on all shards, and then committed on all. In between no shard publishes the version of the
boundary, so that no shard is past the boundary when another shard hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.coordinator.tasks import Tasks, unattended
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.work.leases import SliceLeases
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import patience
from paramserver.wire.messages import consistency_from_proto, consistency_to_proto

log = structlog.get_logger("paramserver.coordinator")

T = TypeVar("T")

# Versions from the newest version to the boundary. Doubled when some shard was past the boundary.
_MARGIN = 2
_ATTEMPTS = 12
_POLL_S = 0.02
_RETRY_S = 0.5
_MAX_WAIT_S = 600.0


class _Job(ports.Stage, ports.Commands, ports.Holding, Protocol):
    leasing: Leasing
    schedule: Schedule
    servers: Servers

    @property
    def resizing(self) -> ports.Resizing: ...


class ModeChange:
    """Changes mode and staleness of a running job, one change at a time."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._lock = asyncio.Lock()
        self._revision = job.consistency.revision
        # Whether a change has sent its first COMMIT, and can no longer be taken back.
        self._committed = False
        # The last revision that was taken back.
        self._aborted = 0
        # The setting that is agreed on, or was in force before the job went back; see `wanted`.
        self._wanted: Consistency | None = None
        # A setting that is agreed on and not in force yet.
        self._coming: Consistency | None = None
        self._closed = False
        self._tasks = Tasks()

    @property
    def wanted(self) -> Consistency | None:
        """The setting that is agreed on, or that was in force before the job went back; None once it is in force."""
        wanted = self._wanted
        return None if wanted is None or _same(wanted, self._job.consistency) else wanted

    @property
    def under_way(self) -> bool:
        """Whether a change is under way, or about to begin."""
        return self._lock.locked() or self.wanted is not None

    @property
    def agreed(self) -> Consistency:
        """The newest setting that all shards have agreed on, in force or not."""
        return self._coming or self._job.consistency

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on with the setting that an earlier coordinator had not brought into force yet."""
        if record.HasField("wanted"):
            self._wanted = consistency_from_proto(record.wanted)

    async def change(self, request: coordinator_pb2.ChangeConsistencyRequest) -> Consistency:
        """Bring the wanted setting into force; returns it with the version from which it counts.

        Raises ConfigError for an unknown mode, DeadlineError if the boundary is not reached in time, UnavailableError
        if the job does not run, or goes back to a checkpoint meanwhile.
        """
        mode = {types_pb2.MODE_SYNC: Mode.SYNC, types_pb2.MODE_ASYNC: Mode.ASYNC}.get(request.mode)
        if mode is None:
            raise errors.ConfigError("consistency.mode must be sync or async")
        staleness = request.staleness if request.HasField("staleness") and mode is Mode.ASYNC else None
        wait_s = patience("wait_s", request.wait_s, _MAX_WAIT_S) or 60.0
        if self._job.resizing.under_way:
            raise errors.UnavailableError("the number of servers changes just now: try again when that is done")
        if self._job.life.phase is not Phase.RUNNING:
            raise errors.UnavailableError("the job is not running yet: try again when all members are there")
        wanted = Consistency(mode, staleness)
        change = self._tasks.begin(self._change(wanted), awaited=True)
        try:
            return await asyncio.wait_for(asyncio.shield(change), wait_s)
        except asyncio.CancelledError:
            if not self._closed:  # the caller has gone; the change goes on
                unattended(change)
                raise
            raise errors.UnavailableError(
                f"the change to {wanted} was interrupted, since all servers begin anew: look at `paramserver status`, "
                "and ask again if it is not in force when the job runs"
            ) from None
        except TimeoutError as error:
            if self._committed:
                unattended(change)
                raise errors.DeadlineError(
                    f"the change to {wanted} is agreed, but its version was not reached within {wait_s:g} s: it comes "
                    "into force then; see `paramserver status` for whom the job waits"
                ) from error
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)
            raise errors.DeadlineError(
                f"the change to {wanted} was given up after {wait_s:g} s: "
                "see `paramserver status` for whom the job waits"
            ) from error

    async def _change(self, wanted: Consistency) -> Consistency:
        async with self._lock:
            before = self._job.consistency
            if _same(before, wanted):
                return before
            self._committed = False
            try:
                if before.mode is wanted.mode:
                    changed = await self._agree(wanted, boundary=0)
                elif wanted.mode is Mode.ASYNC:
                    changed = await self._agree(wanted, boundary=None)
                    await self._now_async(changed)
                else:
                    changed = await self._to_sync(wanted)
            except BaseException:
                if not self._committed:
                    await self._job.leasing.resume()
                raise
            finally:
                self._committed = False
            self._wanted = None
        log.info("consistency", now=str(changed), from_version=changed.from_version)
        return changed

    async def _now_async(self, changed: Consistency) -> None:
        """Once every shard has reached the boundary, lease what is left of the epoch."""
        while any(stats.version < changed.from_version for stats in await self._insist(self._job.shard_stats)):
            await asyncio.sleep(_POLL_S)
        table = self._job.schedule.begin_async(changed.from_version)
        await self._install(changed)
        await self._job.leasing.begin(table)

    async def _to_sync(self, wanted: Consistency) -> Consistency:
        leasing = self._job.leasing
        if leasing.table is not None:
            await leasing.drain()
        versions = {stats.version for stats in await self._job.shard_stats()}
        if len(versions) != 1:
            raise errors.UnavailableError(f"the shards stand at different versions {sorted(versions)}: try again")
        changed = await self._agree(wanted, boundary=versions.pop())
        await self._now_sync(changed, leasing.table)
        return changed

    async def _now_sync(self, changed: Consistency, table: SliceLeases | None) -> None:
        """Begin steps with the slices that are left of the epoch."""
        self._job.schedule.begin_sync(changed.from_version, table)
        await self._install(changed)
        await self._job.leasing.begin(None)

    async def settle(self, newest: Consistency, scheduled: Sequence[int]) -> None:
        """After a takeover: if one shard has committed a change that all had prepared, let all commit it; else none.

        ``scheduled``: the revisions of settings that some shard has scheduled.
        """
        self._revision = max([newest.revision, *scheduled])
        for revision in sorted({*scheduled} - {newest.revision}):
            await self._tell(replace(newest, revision=revision), shard_pb2.PHASE_ABORT)
        if newest.revision in scheduled:
            await self._tell(newest, shard_pb2.PHASE_COMMIT)

    async def complete(self, changed: Consistency, table: SliceLeases | None) -> None:
        """After a takeover: do the rest of a change that all have committed. ``table``: leases of asynchronous mode."""
        before, self._coming = self._job.consistency, changed
        if before.mode is changed.mode:
            await self._install(changed)
            await self._job.leasing.begin(table)
        elif changed.mode is Mode.ASYNC:
            # In the background: to reach a boundary that is ahead, the workers need a coordinator.
            await self._lock.acquire()
            self._wanted = changed
            self._tasks.begin(self._finish(changed))
        else:
            await self._now_sync(changed, table)

    async def _finish(self, changed: Consistency) -> None:
        try:
            await self._now_async(changed)
            self._wanted = None
        finally:
            self._lock.release()

    def next_revision(self) -> int:
        """A revision that no setting has had."""
        self._revision += 1
        return self._revision

    def successor(self) -> ModeChange:
        """The mode changes of the next timeline, after :meth:`close`."""
        after = ModeChange(self._job)
        after._revision = max(self._revision, self._job.consistency.revision)
        after._wanted = self._wanted
        return after

    def bring_back(self) -> None:
        """Change again to the setting that was in force before the job went back to a version with another setting."""
        if self._lock.locked():  # a change is under way, which counts more
            return
        wanted = self._wanted = self.wanted
        if wanted is None:
            return
        log.info("the setting in force before is brought back", consistency=str(wanted))
        self._tasks.begin(self._bring_back(wanted))

    async def _bring_back(self, wanted: Consistency) -> None:
        try:
            await self._insist(partial(self._change, wanted))
        except errors.ParamServerError as error:
            self._wanted = None
            log.warning("the setting could not be brought back", wanted=str(wanted), reason=str(error))

    def server_back(self, server: Member) -> None:
        """Tell a server that is back which change was taken back: otherwise it would wait for that change for ever."""
        if self._aborted:
            aborted = replace(self._job.consistency, revision=self._aborted)
            request = self._request(aborted, shard_pb2.PHASE_ABORT)

            async def tell() -> None:
                places = self._job.holders.places(server)
                timeout_s, reply = self._job.options.call_timeout_s, shard_pb2.SetConsistencyResponse
                await self._job.servers.call_all(places, "Shard.SetConsistency", request, reply, timeout_s)

            self._tasks.begin(self._insist(tell))

    async def close(self) -> None:
        """Stop changes that are under way: the job ends, or all servers begin another timeline."""
        self._wanted, self._closed = self._wanted or self._job.consistency, True
        await self._tasks.close()

    async def _insist(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat ``work`` until it succeeds: a server that comes back later must carry out the change, too."""
        while True:
            try:
                return await work()
            except errors.RetryableError as error:
                log.info(f"the change of mode waits: {error}")
                await asyncio.sleep(_RETRY_S)

    async def _install(self, changed: Consistency) -> None:
        self._job.life.agree(changed)
        self._coming = None
        await self._job.refresh()

    async def _agree(self, wanted: Consistency, boundary: int | None) -> Consistency:
        """Prepare and commit on all shards. ``boundary`` None: a little ahead of the newest version."""
        margin = _MARGIN
        for _ in range(_ATTEMPTS):
            version = boundary
            if version is None:
                version = max(stats.version for stats in await self._job.shard_stats()) + margin
            self._revision += 1
            proposal = replace(wanted, revision=self._revision, from_version=version)
            try:
                replies = await self._tell(proposal, shard_pb2.PHASE_PREPARE)
            except BaseException:
                # Servers that have prepared would hold the boundary for ever, unless they begin anew.
                if not self._closed:
                    with contextlib.suppress(errors.ParamServerError):
                        await self._take_back(proposal)
                raise
            if all(reply.scheduled for reply in replies):
                self._committed, self._wanted, self._coming = True, proposal, proposal
                await self._insist(partial(self._tell, proposal, shard_pb2.PHASE_COMMIT))
                if boundary == 0:
                    await self._install(proposal)
                return proposal
            await self._take_back(proposal)
            margin *= 2
        raise errors.UnavailableError("the shards did not agree on a version boundary: try again")

    async def _take_back(self, proposal: Consistency) -> None:
        """Take a change back: present servers hear of this now, the others when they are back."""
        self._aborted = max(self._aborted, proposal.revision)
        await self._tell(proposal, shard_pb2.PHASE_ABORT)

    async def _tell(self, proposal: Consistency, phase: shard_pb2.Phase) -> list[shard_pb2.SetConsistencyResponse]:
        request = self._request(proposal, phase)
        return await self._job.ask_shards(
            "Shard.SetConsistency",
            request,
            shard_pb2.SetConsistencyResponse,
            present=phase == shard_pb2.PHASE_ABORT,
        )

    def _request(self, proposal: Consistency, phase: shard_pb2.Phase) -> shard_pb2.SetConsistencyRequest:
        return shard_pb2.SetConsistencyRequest(
            job=self._job.options.job,
            generation=self._job.members.generation,
            timeline=self._job.timeline,
            consistency=consistency_to_proto(proposal),
            phase=phase,
            term=self._job.term,
        )


def _same(one: Consistency, other: Consistency) -> bool:
    return (one.mode, one.staleness) == (other.mode, other.staleness)
