"""Changing mode or staleness of a running job, at a version boundary that is the same on every shard.

`core/procedures/mode_change.py` decides what is done when; here it is done.
"""

from __future__ import annotations

import asyncio
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
from paramserver.core.layout.lr_scaling import LrScaling
from paramserver.core.procedures import mode_change as core
from paramserver.core.procedures.mode_change import (
    Agreed,
    Answered,
    Ask,
    AwaitBoundary,
    Command,
    Commit,
    Done,
    Drain,
    Event,
    Failed,
    GiveUp,
    Prepare,
    PutInForce,
    TakeBack,
    Told,
    Wished,
)
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import patience
from paramserver.wire.messages import consistency_from_proto, consistency_to_proto

log = structlog.get_logger("paramserver.coordinator")

T = TypeVar("T")

_POLL_S = 0.02
_RETRY_S = 0.5
_MAX_WAIT_S = 600.0


class _Job(ports.Stage, ports.Commands, ports.Holding, Protocol):
    leasing: Leasing
    schedule: Schedule
    servers: Servers

    @property
    def resizing(self) -> ports.Resizing: ...


def _say_rates(slices: int, scaling: LrScaling) -> None:
    """An update has one slice from now on, and had so many: what that means for learning rates."""
    ratio = scaling.whole(1, slices) / scaling.whole(slices, slices)
    if ratio < 1:
        log.info(
            f"an update has one slice from now on, and had {slices}: learning rates are multiplied by {ratio:.3g} "
            "while that is so (training.lr_scaling)"
        )
    elif slices > 1:
        log.warning(
            f"an update has one slice from now on, and had {slices}, with the same learning rate: training may "
            "diverge, above all with momentum or BatchNorm. With training.lr_scaling = auto, the default, learning "
            f"rates are divided by {slices} while that is so (docs/choose.md)"
        )


class ModeChange:
    """Changes mode and staleness of a running job, one change at a time."""

    def __init__(self, job: _Job, machine: core.ModeChange | None = None) -> None:
        self._job = job
        self._core = machine or core.ModeChange(job.consistency.revision)
        self._lock = asyncio.Lock()
        self._tasks = Tasks()

    @property
    def wanted(self) -> Consistency | None:
        """The setting that is agreed on, or that was in force before the job went back; None once it is in force."""
        wanted = self._core.wanted
        return None if wanted is None or wanted.same_as(self._job.consistency) else wanted

    @property
    def under_way(self) -> bool:
        """Whether a change is under way, or about to begin."""
        return self._lock.locked() or self._core.under_way or self.wanted is not None

    @property
    def agreed(self) -> Consistency:
        """The newest setting that all shards have agreed on, in force or not."""
        return self._core.coming or self._job.consistency

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on with the setting that an earlier coordinator had not brought into force yet."""
        if record.HasField("wanted"):
            self._core = core.ModeChange(self._core.revision, consistency_from_proto(record.wanted))

    async def change(self, request: coordinator_pb2.ChangeConsistencyRequest) -> Consistency:
        """Bring the wanted setting into force; returns it with the version from which it counts.

        Raises ConfigError for an unknown mode, DeadlineError if the boundary is not reached in time, UnavailableError
        if the job does not run, or goes back to a checkpoint meanwhile.
        """
        mode = {types_pb2.MODE_SYNC: Mode.SYNC, types_pb2.MODE_ASYNC: Mode.ASYNC}.get(request.mode)
        if mode is None:
            raise errors.ConfigError("consistency.mode must be sync or async")
        if mode is Mode.ASYNC and self._job.options.sync_batchnorm:
            raise errors.ConfigError(
                "training.sync_batchnorm is true, and in asynchronous mode a step has no slices to take statistics "
                "over: the mode stays sync"
            )
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
            if not self._core.closed:  # the caller has gone; the change goes on
                unattended(change)
                raise
            raise errors.UnavailableError(
                f"the change to {wanted} was interrupted, since all servers begin anew: look at `paramserver status`, "
                "and ask again if it is not in force when the job runs"
            ) from None
        except TimeoutError as error:
            if self._core.committed is wanted:
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
            job = self._job
            return await self._run(Wished(wanted, job.consistency, job.leasing.table is not None))

    async def _run(self, event: Event) -> Consistency:
        """Perform one command after the other; return the setting in force then."""
        changed, former = False, self._job.consistency.mode
        while (command := self._core.handle(event)) is not None:
            changed = True
            try:
                event = await self._perform(command)
            except BaseException as error:  # also if this task is cancelled: servers may wait for the change
                if isinstance(command, GiveUp):
                    raise
                event = Failed(error)
        now = self._job.consistency
        if changed:
            log.info("consistency", now=str(now), from_version=now.from_version)
        options = self._job.options
        if now.mode is Mode.ASYNC is not former:
            _say_rates(options.step_slices, options.lr_scaling)
        return now

    async def _perform(self, command: Command) -> Event:
        job = self._job
        match command:
            case Drain():
                await job.leasing.drain()
            case Ask():
                return await self._ask()
            case Prepare(proposal):
                replies = await self._tell(proposal, shard_pb2.PHASE_PREPARE)
                return Answered(all(reply.scheduled for reply in replies))
            case TakeBack(proposal):
                await self._tell(proposal, shard_pb2.PHASE_ABORT)
            case Commit(proposal, again):
                await asyncio.sleep(_RETRY_S if again else 0.0)
                await self._tell(proposal, shard_pb2.PHASE_COMMIT)
            case AwaitBoundary(again):
                await asyncio.sleep(_RETRY_S if again else _POLL_S)
                return await self._ask()
            case PutInForce(setting, other_mode):
                await self._put_in_force(setting, other_mode)
            case GiveUp(error, resume):
                if resume:
                    await job.leasing.resume()
                raise error
        return Done()

    async def _ask(self) -> Told:
        return Told({stats.version for stats in await self._job.shards.stats()})

    async def _put_in_force(self, setting: Consistency, other_mode: bool) -> None:
        """In another mode, what is left of the epoch becomes leases or steps."""
        job, table = self._job, None
        if other_mode and setting.mode is Mode.ASYNC:
            table = job.schedule.begin_async(setting.from_version)
        elif other_mode:
            job.schedule.begin_sync(setting.from_version, job.leasing.table)
        job.life.agree(setting)
        await job.refresh()
        if other_mode:
            await job.leasing.begin(table)

    async def settle(self, newest: Consistency, scheduled: Sequence[int]) -> None:
        """After a takeover: if one shard has committed a change that all had prepared, let all commit it; else none.

        ``scheduled``: the revisions of settings that some shard has scheduled.
        """
        for command in self._core.settle(newest, scheduled):
            await self._perform(command)

    async def complete(self, changed: Consistency) -> None:
        """After a takeover: do the rest of a change that all have committed."""
        event = Agreed(changed, self._job.consistency)
        if changed.mode is Mode.ASYNC and self._job.consistency.mode is Mode.SYNC:
            # In the background: to reach a boundary that is ahead, the workers need a coordinator.
            self._tasks.begin(self._finish(event))
            await asyncio.sleep(0)
        else:
            await self._run(event)

    async def _finish(self, event: Agreed) -> None:
        async with self._lock:
            await self._run(event)

    def next_revision(self) -> int:
        """A revision that no setting has had."""
        return self._core.next_revision()

    def successor(self) -> ModeChange:
        """The mode changes of the next timeline, after :meth:`close`."""
        revision = max(self._core.revision, self._job.consistency.revision)
        return ModeChange(self._job, core.ModeChange(revision, self._core.wanted))

    def bring_back(self) -> None:
        """Change again to the setting that was in force before the job went back to a version with another setting."""
        wanted = self.wanted
        if wanted is None or self._lock.locked():  # a change is under way, which counts more
            return
        log.info("the setting in force before is brought back", consistency=str(wanted))
        self._tasks.begin(self._bring_back(wanted))

    async def _bring_back(self, wanted: Consistency) -> None:
        try:
            await self._insist(partial(self._change, wanted))
        except errors.ParamServerError as error:
            self._core.forget()
            log.warning("the setting could not be brought back", wanted=str(wanted), reason=str(error))

    def server_back(self, server: Member) -> None:
        """Tell a server that is back which change was taken back: otherwise it would wait for that change for ever."""
        if self._core.aborted:
            aborted = replace(self._job.consistency, revision=self._core.aborted)
            request = self._request(aborted, shard_pb2.PHASE_ABORT)

            async def tell() -> None:
                places = self._job.holders.places(server)
                timeout_s, reply = self._job.options.call_timeout_s, shard_pb2.SetConsistencyResponse
                await self._job.servers.call_all(places, "Shard.SetConsistency", request, reply, timeout_s)

            self._tasks.begin(self._insist(tell))

    async def close(self) -> None:
        """Stop changes that are under way: the job ends, or all servers begin another timeline."""
        self._core.close(self._job.consistency)
        await self._tasks.close()

    async def _insist(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat ``work`` until it succeeds: a server that comes back later must carry out the change, too."""
        while True:
            try:
                return await work()
            except errors.RetryableError as error:
                log.info(f"the change of mode waits: {error}")
                await asyncio.sleep(_RETRY_S)

    async def _tell(self, proposal: Consistency, phase: shard_pb2.Phase) -> list[shard_pb2.SetConsistencyResponse]:
        request = self._request(proposal, phase)
        return await self._job.shards.ask(
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
