"""Another number of servers in a running job: new shards are filled from the former shards, which keep everything.

`core/procedures/resizing.py` says what may be done. The former shards bring the new ones and their backups their chunks
while training goes on, and then what versions are made of. When all former shards stand at one version and no
contribution is open, the new shards are at this version, too. Then the record of the job says that the new plan is in
force, and workers follow to another timeline, on which nothing is undone. Until then the change can be given up at any
moment: workers get the version for which they wait from the former shards.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.config import MAX_PROCESSES
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.loads import Loads
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.coordinator.work.filling import Filling
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.coordinator.work.rest import at_rest
from paramserver.coordinator.work.schedule import Schedule
from paramserver.coordinator.work.shards import lease_table
from paramserver.core.job.holders import Holders
from paramserver.core.job.life import Moves, Phase, WentBack
from paramserver.core.job.membership import Role
from paramserver.core.job.status import more_of
from paramserver.core.procedures import resizing as core
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.leases import SliceLeases
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import patience
from paramserver.wire.messages import consistency_to_proto

log = structlog.get_logger("paramserver.coordinator")

_WAIT_S, _LONGEST_WAIT_S = 60.0, 600.0
# Between two looks at how far the new shards are: at first, and at most.
_AHEAD_S, _LATER_S = 0.02, 0.5
# How long former shards may take to bring chunks while training goes on.
_LONGEST_AHEAD_S = 400.0


class _Registry(Protocol):
    """See `coordinator.model`."""

    model: types_pb2.ModelSpec | None
    ready: bool

    def configuration(self, shard: int) -> shard_pb2.ConfigureRequest: ...


class _Replication(ports.Holding, Protocol):
    """See `coordinator.work.replication`."""

    def adopt(self, holders: Holders) -> None: ...


class _Job(ports.Stage, ports.Course, ports.Commands, ports.Ends, Protocol):
    address: str
    draining: set[int]
    checkpoints: Checkpoints
    journal: Journal
    keeping: Keeping
    leasing: Leasing
    loads: Loads
    mode_change: ModeChange
    over: asyncio.Future[str]
    schedule: Schedule
    servers: Servers

    @property
    def registry(self) -> _Registry: ...

    @property
    def replication(self) -> _Replication: ...

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def given_up(self) -> bool: ...

    def worker_infos(self) -> list[types_pb2.WorkerInfo]: ...

    def has_servers(self, servers: int) -> None: ...

    def write_down(self) -> None: ...


class Resizing:
    """The changes of the number of servers of one job."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._core = core.Resizing(job.options.servers)
        # The timeline before the present one, if nothing was undone between the two.
        self.carried_from: int | None = None
        # A new plan is in force, and workers have not heard of it.
        self._moved = False
        self._former_plan = 0
        self._task: asyncio.Task[float] | None = None

    # ---- facts, and the record

    @property
    def under_way(self) -> bool:
        """Whether a change is under way."""
        return self._core.under_way or self._moved

    @property
    def seats(self) -> int:
        """For how many servers there is a place in the job."""
        return self._core.seats

    @property
    def plan(self) -> int:
        """The number of the plan in force, as servers hear it.

        They hear of a new plan, and drop the former shards, when the store has the record that speaks of the new plan.
        """
        return self._former_plan if self._moved else self._core.plan

    @property
    def settled(self) -> int:
        """The newest plan that is in force or was given up, as servers hear it."""
        return self._core.settled - self._moved

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write the plan into the record of the job."""
        record.plan, record.newest_plan, record.moved = self._core.plan, self._core.newest_plan, self._moved
        record.wanted_servers = self._core.wanted
        if self.carried_from is not None:
            record.carried_from = self.carried_from

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator. A change that was under way is given up."""
        self._core.restore(record.expected_servers, record.plan, record.newest_plan)
        self.carried_from = record.carried_from if record.HasField("carried_from") else None
        self._job.servers.use(record.plan)

    # ---- the command

    async def scale(self, request: coordinator_pb2.ScaleRequest) -> coordinator_pb2.ScaleResponse:
        """Have so many servers; return when they hold the model.

        Raises ConfigError if that cannot be, DeadlineError if it takes longer than the caller waits: then nothing has
        changed.
        """
        job, wanted = self._job, request.servers
        wait_s = patience("wait_s", request.wait_s, _LONGEST_WAIT_S) or _WAIT_S
        if job.life.phase is not Phase.RUNNING:
            raise errors.ConfigError(
                f"the number of servers can be changed while the job trains, but it is {job.life.phase.value}: "
                f"{job.reason or 'try again later'}"
            )
        if why := core.refusal(wanted, self._facts()):
            raise errors.ConfigError(why)
        if wanted == job.options.servers:
            return coordinator_pb2.ScaleResponse(servers=wanted)
        self._core.wish(wanted)
        self._task = job.tasks.begin(self._run(wait_s), awaited=True)
        try:
            paused_s = await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self._task.cancelled():  # the caller has gone; the change goes on
                raise
            raise errors.UnavailableError(
                f"the change to {wanted} servers was given up, since the job goes back to a checkpoint: ask again"
            ) from None
        return coordinator_pb2.ScaleResponse(servers=job.options.servers, paused_s=paused_s)

    def _facts(self) -> core.Facts:
        job = self._job
        there = {server.index for server in job.members.of(Role.SERVER)}
        leaving = [one.name for one in job.members.of(Role.SERVER) if one.ident in job.draining]
        model = job.registry.model
        return core.Facts(
            servers=job.options.servers,
            replicas=job.options.replicas,
            most=MAX_PROCESSES,
            missing=", ".join(f"server-{index}" for index in range(job.options.servers) if index not in there),
            leaves=", ".join(leaving),
            busy=self._busy(),
            split=bool(model is not None and model.shares) or any(s.beside_worker for s in job.members.of(Role.SERVER)),
        )

    def _busy(self) -> str:
        job = self._job
        if self.under_way:
            return "the number of servers changes"
        if job.mode_change.under_way:
            return "the mode or the staleness changes"
        if job.loads.agreement.pending or job.loads.under_way is not None:
            return "the scripts load weights"
        if job.consistency.mode is Mode.ASYNC and job.schedule.data is None:
            return "the job waits for its data"
        return ""

    def abandon(self) -> None:
        """The job goes back: a change that is under way is given up."""
        self.carried_from, self._moved = None, False
        if self._core.under_way and self._task is not None:
            self._core.undo()
            self._task.cancel()

    def look(self) -> None:
        """Ask servers to leave for which there is no place any more. Called several times a second."""
        job = self._job
        if self.under_way:
            return
        idle = [one.ident for one in job.members.of(Role.SERVER) if one.index >= job.options.servers]
        if not job.draining.issuperset(idle):
            job.draining.update(idle)
            job.tasks.begin(job.refresh())

    # ---- the change

    async def _run(self, wait_s: float) -> float:
        """Make the change; the seconds for which workers waited. If it fails, it is given up.

        ``wait_s``: the longest wait for servers that are missing, and for the job to come to rest.
        """
        job, wanted = self._job, self._core.wanted
        log.info("the number of servers changes", servers=wanted, now=job.options.servers)
        drained = False
        try:
            await job.refresh()
            await self._servers_there(time.monotonic() + wait_s)
            self._core.prepare()
            # The number of the plan is used once only, also by another coordinator.
            job.write_down()
            await job.journal.settled()
            if job.journal.behind:
                raise errors.UnavailableError("the store does not answer: try again when it does")
            await self._ahead()
            drained = job.leasing.table is not None
            began, version = await at_rest(job, self._core.newest_plan, time.monotonic() + wait_s, self._check)
            await self._switch(version)
        except BaseException as error:
            if not self._core.under_way and not self._moved:  # the job goes back
                raise
            if isinstance(error, errors.FencedError):
                await job.replaced(str(error))
            if self._moved and isinstance(error, asyncio.CancelledError):  # another coordinator goes on
                raise
            if self._moved:
                await job.fail(f"the servers could not be told of their new number: {error}")
                raise
            self._core.undo()
            log.warning("the number of servers stays as it is", servers=job.options.servers, reason=str(error))
            await asyncio.shield(job.tasks.begin(self._given_up(drained), awaited=True))
            raise
        paused_s = time.monotonic() - began
        log.info("the number of servers has changed", servers=wanted, version=version, paused_s=round(paused_s, 3))
        return paused_s

    async def _given_up(self, drained: bool) -> None:
        """Let workers go on with the former shards."""
        job = self._job
        if drained:
            await job.leasing.resume()
        await job.refresh()
        if not await job.keeping.tell():
            job.keeping.wake()

    async def _servers_there(self, deadline: float) -> None:
        job = self._job
        while missing := self._missing():
            self._check()
            if not await job.changes.wait(min(deadline, time.monotonic() + 1.0)) and time.monotonic() > deadline:
                hint = (
                    "see the log of the run"
                    if job.options.launched
                    else more_of(
                        "server",
                        self._core.wanted,
                        (server.restart_command for server in job.members.of(Role.SERVER)),
                        f"start each of them on its machine: paramserver start server --join {job.address}",
                    )
                )
                raise errors.DeadlineError(
                    f"{len(missing)} of {self._core.wanted} servers are missing ({', '.join(missing[:8])}), so the "
                    f"number of servers stays {job.options.servers}: {hint}; then ask again"
                )

    def _missing(self) -> list[str]:
        there = {server.index for server in self._job.members.of(Role.SERVER)}
        return [f"server-{index}" for index in range(self._core.seats) if index not in there]

    def _check(self) -> None:
        """Raise UnavailableError if the change cannot go on."""
        job = self._job
        if job.life.phase is not Phase.RUNNING or job.recovery.under_way or job.given_up or job.over.done():
            raise errors.UnavailableError("the job does not train any more")
        if not job.members.of(Role.WORKER):
            raise errors.UnavailableError("no worker is there")
        if job.loads.agreement.pending:
            raise errors.UnavailableError("the scripts load weights just now: try again when that is done")

    def _filling(self) -> Filling:
        """The shards of the new plan, and where the former ones are just now."""
        job = self._job
        servers = {one.index: one for one in job.members.of(Role.SERVER)}
        return Filling(job, self._core.newest_plan, self._core.wanted, job.replication.holders, servers)

    async def _ahead(self) -> None:
        """Have former shards bring the new ones their chunks while training goes on.

        Return when all is there, or after _LONGEST_AHEAD_S: then the rest is fetched while workers wait.
        """
        consistency = consistency_to_proto(self._job.consistency)
        began = time.monotonic()
        filling, pause_s = self._filling(), _AHEAD_S
        while time.monotonic() < began + _LONGEST_AHEAD_S:
            self._check()
            filling.check()
            filling = self._filling()
            try:
                if await filling.ahead(consistency):
                    log.info("the new servers have their parts", after_s=round(time.monotonic() - began, 3))
                    return
            except errors.RetryableError as error:
                log.info("trying again to reach a server", reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LATER_S)
        log.warning("the new servers do not have their parts yet, and get the rest while the workers wait")

    async def _switch(self, version: int) -> None:
        """All shards stand at ``version``: fill the new ones, and let workers follow."""
        job, before = self._job, self._job.timeline
        # Under a revision that no worker has heard of.
        consistency = replace(job.consistency, revision=job.mode_change.next_revision())
        filling = self._filling()
        await filling.fill(version, consistency_to_proto(consistency))
        table = await lease_table(job)
        self._check()
        filling.check()
        # From here on the new plan is in force. Nothing is waited for until all of this is done.
        assert job.life.handle(Moves()), "the job trains"
        self._former_plan, self.carried_from, self._moved = self._core.plan, before, True
        self._core.commit()
        job.life.begin_timeline()
        job.life.agree(consistency)
        job.has_servers(self._core.servers)
        job.servers.use(self._core.plan)
        job.replication.adopt(filling.holders)
        job.checkpoints.new_timeline(version)
        await self._tell(table)

    async def _tell(self, table: SliceLeases | None) -> None:
        """The new plan is in force: write that down, then tell all servers and workers."""
        job, timeline = self._job, self._job.timeline
        job.write_down()
        await job.checkpoints.rolled_back()
        await job.mode_change.close()
        await job.leasing.begin(None)
        await job.keeping.settled()
        job.reopen_mode_change()
        await job.leasing.begin(table)
        await job.keeping.tell()
        if job.timeline != timeline or job.recovery.under_way:  # a server was lost meanwhile, and the job goes back
            return
        self._moved = False
        job.life.handle(WentBack())
        self.look()
        await job.refresh()
