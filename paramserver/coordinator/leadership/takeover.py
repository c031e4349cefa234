"""Taking over a job from a coordinator that is gone: from its record, and from the answers of the servers.

`core/procedures/takeover.py` decides whose answer counts and what is done when; here it is done.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.coordinator.admission import server_gone
from paramserver.coordinator.job import Job
from paramserver.coordinator.leadership.members import member_of
from paramserver.coordinator.work.shards import lease_table
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.procedures.takeover import (
    Ask,
    Done,
    Event,
    Fail,
    GoBack,
    GoOn,
    Later,
    LookForCheckpoints,
    NotHeard,
    Number,
    Obey,
    Promote,
    Publish,
    Record,
    Report,
    StepDown,
    Takeover,
    Told,
)
from paramserver.core.versions.consistency import Consistency
from paramserver.transport.security.fields import taken_over
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import consistency_from_proto

log = structlog.get_logger("paramserver.coordinator")

_ENDED = (
    types_pb2.JOB_STATE_UNSPECIFIED,
    types_pb2.JOB_STATE_FAILED,
    types_pb2.JOB_STATE_DONE,
    types_pb2.JOB_STATE_STOPPED,
)
_CALL_S = 5.0
# Members look for another coordinator about once a second, but notice a silent connection only this late.
_FIND_S = 20.0
_SAY_S = 5.0
# In place of the names of lost servers, if all servers are there, but not at one moment of the job.
_STRAYED = "a server that is on another timeline"


def unfinished(record: coordinator_pb2.JobRecord | None) -> bool:
    """Whether the record is of a job that has not ended."""
    return record is not None and (record.view.state not in _ENDED or _stopping(record))


def begun(record: coordinator_pb2.JobRecord | None) -> bool:
    """Whether the record is of a job that has a model and has not ended."""
    return record is not None and bool(record.layout) and unfinished(record)


def _stopping(record: coordinator_pb2.JobRecord) -> bool:
    """True if the job was told to stop and its result has not been gathered."""
    return record.view.state == types_pb2.JOB_STATE_STOPPED and not record.view.released


async def take_over(
    job: Job,
    record: coordinator_pb2.JobRecord,
    patience_s: float,
    newcomers: Callable[[], int] = lambda: 0,
    key_of: Callable[[int], bytes] = lambda incarnation: b"",
) -> None:
    """Make ``job``, new and without members, go on where ``record`` and the servers stand.

    Waits up to ``patience_s`` for all servers; ``newcomers`` tells how many servers without a shard want to join, and
    ``key_of`` the key that the server of an incarnation has told since, if the record is one that servers have kept.
    Raises JobFailedError if a shard is gone, DeadlineError naming the servers that did not answer; other errors that
    are retryable: call it again.
    """
    for entry in record.members:
        entry.key = entry.key or key_of(entry.incarnation)
    await _TakingOver(job, record, newcomers).run(patience_s)


class _TakingOver:
    """Performs what `core/procedures/takeover.py` decides, in one attempt."""

    def __init__(self, job: Job, record: coordinator_pb2.JobRecord, newcomers: Callable[[], int]) -> None:
        self._job, self._record, self._newcomers = job, record, newcomers
        self._members = _restore(job, record)
        self._model: types_pb2.ModelSpec | None = None
        # By member number and shard: what servers have said.
        self._stats: dict[int, dict[int, shard_pb2.StatsResponse]] = {}
        self._said = time.monotonic()

    async def run(self, patience_s: float) -> None:
        """Perform one command after the other. Raises as :func:`take_over`."""
        job, record = self._job, self._record
        self._model = await job.journal.model() if record.layout else None
        servers = job.members.of(Role.SERVER)
        core = Takeover(self._facts(), job.holders, servers, job.term, job.known_term, time.monotonic(), patience_s)
        while not core.over:
            core.handle(await self._perform(core), time.monotonic())
        match core.command:
            case GoOn(published):
                await self._go_on(published, [self._stats[i][shard] for shard, i in core.sources().items()])
            case GoBack(lost):
                await self._go_back(lost)
            case Later(reason, late):
                raise errors.DeadlineError(reason) if late else errors.UnavailableError(reason)
            case StepDown(reason, term):
                job.heard_of(taken_over(term))
                raise errors.FencedError(reason)
            case Fail(reason):
                raise errors.JobFailedError(reason)

    def _facts(self) -> Record:
        record = self._record
        return Record(
            model=bool(record.layout),
            described=self._model is not None,
            ready=record.ready,
            timeline=record.view.timeline,
            placement=record.view.placement,
            servers=record.expected_servers,
            checkpoints=self._job.checkpoints.place is not None,
            loading=record.HasField("loading"),
            recovering=record.view.state == types_pb2.JOB_STATE_RECOVERING and not record.moved,
        )

    async def _perform(self, core: Takeover) -> Event:
        job = self._job
        match core.command:
            case Ask(servers, rest_s):
                if rest_s and time.monotonic() - self._said >= _SAY_S:
                    self._said = time.monotonic()
                    log.info(f"taking over; waiting for {core.waiting_for}")
                await asyncio.sleep(rest_s)
                return Told(await self._ask(servers), self._newcomers())
            case Number(generation, term):
                if not job.known_term:
                    job.heard_of(taken_over(term))
                job.members.generation = max(job.members.generation, taken_over(generation)) + 1
            case Promote(gone, published):
                assert self._model is not None, "there is a model"
                job.registry.restore(self._model, self._record, self._workers(), published)
                await job.replication.take_over(gone)
                left = {server.ident for server in gone}
                self._members = [member for member in self._members if member.ident not in left]
            case Obey():
                return Done() if await job.keeping.tell() else NotHeard()
            case Publish():
                await job.registry.publish()
            case LookForCheckpoints():
                await _find_complete(job)
        return Done()

    def _workers(self) -> list[int]:
        return [member.ident for member in self._members if member.role is Role.WORKER]

    async def _ask(self, servers: Sequence[Member]) -> dict[int, list[Report]]:
        """By member number, the reports of the servers that answer."""
        job = self._job
        request = shard_pb2.StatsRequest(job=job.options.job)
        places = [job.holders.copies(server) for server in servers]
        replies = await asyncio.gather(
            *(job.servers.call_all(one, "Shard.Stats", request, shard_pb2.StatsResponse, _CALL_S) for one in places),
            return_exceptions=True,
        )
        answers: dict[int, list[Report]] = {}
        for server, held, told in zip(servers, places, replies, strict=True):
            if isinstance(told, BaseException):
                if not isinstance(told, errors.RetryableError):
                    raise told
                continue
            self._stats[server.ident] = {shard: reply for (shard, _), reply in zip(held, told, strict=True)}
            answers[server.ident] = [self._report(shard, reply) for shard, reply in self._stats[server.ident].items()]
        return answers

    def _report(self, shard: int, reply: shard_pb2.StatsResponse) -> Report:
        return Report(
            shard=shard,
            incarnation=reply.incarnation,
            recorded=reply.holds == self._record.layout,
            backup=reply.backup,
            active=reply.active,
            timeline=reply.timeline,
            placement=reply.placement,
            generation=reply.generation,
            term=reply.term,
        )

    async def _go_on(self, published: bool, stats: Sequence[shard_pb2.StatsResponse]) -> None:
        """The job goes on where the servers stand."""
        job, record, members = self._job, self._record, self._members
        if not record.layout:
            job.members.generation += 1
        if published:
            if record.ready or any(reply.version for reply in stats):
                job.life.take_over(Phase.RUNNING)
                job.reports.started(record.training_s)
            await _restore_consistency(job, record, stats)
        elif job.schedule.data is not None:
            await job.leasing.register(job.schedule.data)
        # From now on the leases of the members run.
        job.members.restore(members, time.monotonic() + job.options.lease_s + _FIND_S)
        _stop(job, record)
        if published:
            job.replication.begin()
        if job.life.phase is Phase.RUNNING:
            job.mode_change.bring_back()
        await job.refresh()
        job.ending.look()
        log.info("took over", term=job.term, generation=job.members.generation, members=len(members))

    async def _go_back(self, lost: Sequence[Member]) -> None:
        """The servers ``lost`` are gone, or some are on another timeline: when all are there, the job goes back."""
        job, record = self._job, self._record
        assert self._model is not None, "there is a model"
        ready = record.ready or record.HasField("loading")  # a load begins when there is a version
        job.registry.restore(self._model, record, self._workers(), ready)
        job.life.agree(consistency_from_proto(record.view.consistency))
        job.life.take_over(Phase.RUNNING if ready else Phase.INITIALISING)
        _stop(job, record)
        job.reports.started(record.training_s)
        job.members.restore(self._members, time.monotonic() + job.options.lease_s + _FIND_S)
        for server in lost:
            job.members.forget(server.ident)
            server_gone(job, server, lost=True, reason="it did not answer the new coordinator as the one that it was")
        names = ", ".join(server.name for server in lost) or _STRAYED
        job.recovery.begin(f"{names} lost together with the coordinator")
        await job.refresh()
        log.info("took over", term=job.term, generation=job.members.generation, lost=names)


def _restore(job: Job, record: coordinator_pb2.JobRecord) -> list[Member]:
    """Take over all that the record says beside the model; return the recorded members, whose leases do not run yet."""
    job.restore(record)
    members = [member_of(entry) for entry in record.members]
    job.members.restore(members, math.inf)
    return members


async def _find_complete(job: Job) -> None:
    """Find the checkpoints of this timeline that earlier coordinators completed. The record may lack the newest ones.

    Raises UnavailableError if their place cannot be read.
    """
    place, holding = job.checkpoints.place, job.options.checkpoints.holding
    if place is None:
        return
    try:
        found = await asyncio.to_thread(
            catalog.complete, place, lambda history: holding is None or history == holding.history
        )
    except errors.CheckpointError as error:
        raise errors.UnavailableError(str(error)) from error
    job.checkpoints.completed([saved.name for saved in found if saved.timeline == job.timeline])


def _stop(job: Job, record: coordinator_pb2.JobRecord) -> None:
    """A job that was told to stop does not train on."""
    if _stopping(record):
        job.life.take_over(Phase.STOPPED, record.view.reason)
        job.end("stopped")


async def _restore_consistency(
    job: Job, record: coordinator_pb2.JobRecord, stats: Sequence[shard_pb2.StatsResponse]
) -> None:
    """Take over mode and staleness from the shards; complete a change that was under way, or take it back."""
    job.life.agree(consistency_from_proto(record.view.consistency))
    agreed = {c.revision: c for c in (_agreed(reply) for reply in stats)}
    newest = agreed[max(agreed)]
    await job.mode_change.settle(newest, [r.scheduled.revision for r in stats if r.HasField("scheduled")])
    if (table := await lease_table(job)) is not None:
        await job.leasing.begin(table)
    if newest.revision > job.consistency.revision:
        await job.mode_change.complete(newest)


def _agreed(reply: shard_pb2.StatsResponse) -> Consistency:
    return consistency_from_proto(reply.scheduled if reply.committed else reply.consistency)
