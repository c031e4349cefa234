"""Taking over a job from a coordinator that is gone: from its record, and from the answers of the servers.

Where the two differ, the servers are right: their shards hold the weights, and the names of all counted contributions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.coordinator.admission import server_gone
from paramserver.coordinator.job import Job
from paramserver.coordinator.work.shards import lease_table
from paramserver.core.job.holders import Found
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Presence, Role
from paramserver.core.versions.consistency import Consistency
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
# A server that cannot be reached for so long is taken for gone, if others have its shards.
_UNREACHABLE_S = 0.2
_RETRY_S = 0.5
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
) -> None:
    """Make ``job``, new and without members, go on where ``record`` and the servers stand.

    Waits up to ``patience_s`` for all servers; ``newcomers`` tells how many servers without a shard want to join.
    Raises JobFailedError if a shard is gone, DeadlineError naming the servers that did not answer; other errors that
    are retryable: call it again.
    """
    members = _restore(job, record)
    model = await job.journal.model() if record.layout else None
    if record.layout and model is None:
        raise errors.JobFailedError("the store has lost the description of the model: the job cannot be taken over")
    if model is not None:
        servers = await _ask_servers(job, record, patience_s, newcomers)
        stats, strayed, gone = servers.reports, servers.strayed, servers.gone
        if not job.known_term and stats:
            job.heard_of(max(reply.term for reply in stats.values()))
            if job.known_term >= job.term:
                raise errors.FencedError(f"the store has forgotten term {job.known_term}, which a server has heard of")
        job.members.generation = max([job.members.generation, *(reply.generation for reply in stats.values())]) + 1
        if record.HasField("loading"):
            if job.checkpoints.place is None:
                raise errors.JobFailedError(
                    "the coordinator was lost in the middle of ctx.load, and there is no checkpoint: set checkpoint.dir"
                )
            record.ready, strayed = True, True  # the version before the load is in a checkpoint
        recovering = record.view.state == types_pb2.JOB_STATE_RECOVERING and not record.moved
        if recovering and job.checkpoints.place is not None:
            strayed = True  # the record and the servers may speak of different moments: go back again
        if servers.lost or strayed:
            await _take_over_without(job, record, model, members, servers.lost)
            return
        # The earlier coordinator may have published version 0 on some servers only, or not have written that down.
        published = record.ready or any(reply.active for reply in stats.values())
        job.registry.restore(model, record, [m.ident for m in members if m.role is Role.WORKER], published)
        await job.replication.take_over(gone)
        # From here on the servers obey no earlier coordinator, so that their next answers will stand.
        if not await job.keeping.tell():
            raise errors.UnavailableError("a server did not hear of the new coordinator")
        if published:
            await job.registry.publish()
        left = {server.ident for server in gone}
        members = [member for member in members if member.ident not in left]
        servers = await _ask_servers(job, record, patience_s, newcomers)
        if servers.lost or servers.strayed or servers.gone:
            raise errors.UnavailableError(f"{', '.join(_names([*servers.lost, *servers.gone]))} was lost just now")
        stats = servers.reports
        await _find_complete(job)
    else:
        job.members.generation += 1
        published = False
    if published:
        if record.ready or any(reply.version for reply in stats.values()):
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


def _restore(job: Job, record: coordinator_pb2.JobRecord) -> list[Member]:
    """Take over all that the record says beside the model; return the recorded members, whose leases do not run yet."""
    job.restore(record)
    members = [_member(entry) for entry in record.members]
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


async def _take_over_without(
    job: Job,
    record: coordinator_pb2.JobRecord,
    model: types_pb2.ModelSpec,
    members: list[Member],
    lost: Sequence[Member],
) -> None:
    """The servers ``lost`` are gone, or some are on another timeline: when all are there, the job goes back."""
    job.registry.restore(model, record, [m.ident for m in members if m.role is Role.WORKER], record.ready)
    job.life.agree(consistency_from_proto(record.view.consistency))
    job.life.take_over(Phase.RUNNING if record.ready else Phase.INITIALISING)
    _stop(job, record)
    job.reports.started(record.training_s)
    job.members.restore(members, time.monotonic() + job.options.lease_s + _FIND_S)
    for server in lost:
        job.members.forget(server.ident)
        server_gone(job, server, lost=True, reason="it did not answer the new coordinator as the one that it was")
    job.recovery.begin(f"{', '.join(_names(lost))} lost together with the coordinator")
    await job.refresh()
    log.info("took over", term=job.term, generation=job.members.generation, lost=_names(lost))


def _names(lost: Sequence[Member]) -> list[str]:
    return [server.name for server in lost] or [_STRAYED]


def _member(entry: coordinator_pb2.MemberRecord) -> Member:
    role = Role.SERVER if entry.role == types_pb2.ROLE_SERVER else Role.WORKER
    return Member(
        ident=entry.member,
        role=role,
        index=entry.index,
        name=f"{role.value}-{entry.index}",
        expires_at=0.0,
        presence=Presence.SILENT,
        address=entry.address,
        pid=entry.pid,
        incarnation=entry.incarnation,
        beside_worker=entry.beside_worker,
        restart_command=entry.restart_command,
        metrics_url=entry.metrics_url,
    )


@dataclass(frozen=True, slots=True)
class _Servers:
    """The answers of the recorded servers. ``reports``: of all shards, by their index.

    ``strayed``: a server is on another timeline. It is not lost: it goes back with the others. ``lost``: servers whose
    shards are lost and can be restored. ``gone``: servers that do not answer, and whose shards others have.
    """

    reports: Mapping[int, shard_pb2.StatsResponse]
    strayed: bool
    lost: Sequence[Member] = ()
    gone: Sequence[Member] = ()


async def _ask_servers(
    job: Job, record: coordinator_pb2.JobRecord, patience_s: float, newcomers: Callable[[], int]
) -> _Servers:
    """Ask all servers until each shard is accounted for."""
    answers = _Answers(job, record)
    began = said = time.monotonic()
    deadline = began + patience_s
    while True:
        await answers.ask()
        found, silent = answers.found(), answers.silent()
        if not silent and len(found) == len(job.holders):
            return _Servers(found, answers.strayed)
        there = [server.index for server in job.members.of(Role.SERVER) if server not in silent]
        covered = bool(silent) and all(job.holders.covered(server.index, there) for server in silent)
        if covered and time.monotonic() - began > _UNREACHABLE_S:
            return _Servers(found, answers.strayed, gone=silent)
        if not covered and silent and job.checkpoints.place is not None and newcomers() >= len(silent):
            return _Servers(found, answers.strayed, lost=silent)
        names = ", ".join(f"{server.name} at {server.address}" for server in silent) or "servers that never joined"
        if job.checkpoints.place is None and newcomers() >= record.expected_servers:
            raise errors.JobFailedError("all servers have begun anew: the model is gone")
        if time.monotonic() >= deadline:
            raise errors.DeadlineError(
                f"the job cannot be taken over: no answer within {patience_s:.0f} s from {names}"
            )
        if time.monotonic() - said >= _SAY_S:
            said = time.monotonic()
            log.info(f"taking over; waiting for {names}")
        await asyncio.sleep(_UNREACHABLE_S if covered else _RETRY_S)


class _Answers:
    """The reports of the recorded servers, as far as they have answered."""

    def __init__(self, job: Job, record: coordinator_pb2.JobRecord) -> None:
        self._job, self._record = job, record
        # By the member number of a server: the reports of its shards, by their index.
        self._told: dict[int, dict[int, shard_pb2.StatsResponse]] = {}
        self.strayed = False

    def found(self) -> dict[int, shard_pb2.StatsResponse]:
        """By shard, the report of its primary."""
        found: dict[int, shard_pb2.StatsResponse] = {}
        for reports in self._told.values():
            for shard, report in reports.items():
                newer = shard not in found or report.placement > found[shard].placement
                if not report.backup and newer:
                    found[shard] = report
        return found

    def silent(self) -> list[Member]:
        """Servers that have not answered."""
        return [server for server in self._job.members.of(Role.SERVER) if server.ident not in self._told]

    async def ask(self) -> None:
        """Ask all servers that have not answered."""
        job = self._job
        request = shard_pb2.StatsRequest(job=job.options.job)
        servers = [server for server in job.members.of(Role.SERVER) if server.ident not in self._told]
        replies = await asyncio.gather(
            *(
                job.servers.call_all(places, "Shard.Stats", request, shard_pb2.StatsResponse, _CALL_S)
                for places in map(job.holders.copies, servers)
            ),
            return_exceptions=True,
        )
        for server, told in zip(servers, replies, strict=True):
            if isinstance(told, BaseException):
                if not isinstance(told, errors.RetryableError):
                    raise told
                continue
            self._take(server, told)

    def _take(self, server: Member, told: list[shard_pb2.StatsResponse]) -> None:
        job, record = self._job, self._record
        others = [one.index for one in job.members.of(Role.SERVER) if one.index != server.index]
        replaceable = job.checkpoints.place is not None or job.holders.covered(server.index, others)
        if replaceable and any(reply.incarnation != server.incarnation for reply in told):
            return  # another process at its address, which asks to join
        if not all(_as_recorded(server, reply, record) for reply in told):
            if not replaceable:
                raise errors.JobFailedError(
                    f"{server.name} at {server.address} has begun anew: its shard of the model is gone, and "
                    "the job cannot be taken over"
                )
            self.strayed = self.strayed or any(not reply.backup for reply in told)
        shards = [shard for shard, _ in job.holders.copies(server)]
        self._told[server.ident] = dict(zip(shards, told, strict=True))
        for shard, reply in self._told[server.ident].items():
            if not reply.backup and reply.active and reply.placement > record.view.placement:
                job.holders.handle(Found(shard, server.index))


def _as_recorded(server: Member, reply: shard_pb2.StatsResponse, record: coordinator_pb2.JobRecord) -> bool:
    """Whether a server still has the shard that the record speaks of."""
    same = reply.incarnation == server.incarnation and (reply.holds == record.layout or reply.backup)
    return same and (not record.ready or (reply.active and reply.timeline == record.view.timeline))


async def _restore_consistency(
    job: Job, record: coordinator_pb2.JobRecord, stats: Mapping[int, shard_pb2.StatsResponse]
) -> None:
    """Take over mode and staleness from the shards; complete a change that was under way, or take it back."""
    job.life.agree(consistency_from_proto(record.view.consistency))
    agreed = {c.revision: c for c in (_agreed(reply) for reply in stats.values())}
    newest = agreed[max(agreed)]
    await job.mode_change.settle(newest, [r.scheduled.revision for r in stats.values() if r.HasField("scheduled")])
    if (table := await lease_table(job)) is not None:
        await job.leasing.begin(table)
    if newest.revision > job.consistency.revision:
        await job.mode_change.complete(newest)


def _agreed(reply: shard_pb2.StatsResponse) -> Consistency:
    return consistency_from_proto(reply.scheduled if reply.committed else reply.consistency)
