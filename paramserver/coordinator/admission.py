"""Checks of a newcomer: its role, versions and settings, and of a server the shard and the place of checkpoints.

`core/job/seats.py` decides about the seats of servers. The decisions are carried out here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from paramserver import errors
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.probe import Question
from paramserver.coordinator.job import Job
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.job.seats import (
    Back,
    Drop,
    Event,
    Facts,
    Gone,
    JobFails,
    Missed,
    Newcomer,
    Seat,
    Stranger,
    Taken,
    TooMany,
    TryAgain,
)
from paramserver.core.versions.consistency import Mode
from paramserver.membership.joining import versions
from paramserver.transport.base import caller
from paramserver.transport.security.access import deny
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import PROTOCOL, mode_to_proto

log = structlog.get_logger("paramserver.coordinator")

# With another version of these packages a member would get other bits.
_SAME = ("paramserver", "torch")
# A server that the job needs waits so long until it is known whether it shares the place of checkpoints.
_LOOK_S = 2.0


def check_join(job: Job, request: coordinator_pb2.JoinRequest, role: Role) -> None:
    """Raise an error if the newcomer has another role, job, versions or settings, or if the job has ended."""
    _check_role(role)
    if job.life.phase is Phase.FAILED:
        raise errors.JobFailedError(job.reason)
    # The result of a stopped job may still need a server in the place of one that is gone.
    if job.life.final or (job.ended and role is not Role.SERVER):
        raise errors.EndedError(f"there is nothing left to do: job {job.options.job!r} has ended ({job.reason})")
    if request.job and request.job != job.options.job:
        raise errors.ConfigError(f"this coordinator runs job {job.options.job!r}, not {request.job[:100]!r}")
    if request.beginning not in (0, job.beginning):
        _check_beginning(job, request, role)
    check_versions(request.protocol, request.versions, role)
    if role is not Role.OBSERVER:
        _check_settings(job, request, role)


def _check_beginning(job: Job, request: coordinator_pb2.JoinRequest, role: Role) -> None:
    """Refuse a process of another job of this name. If no job has begun here yet, that job may still be found."""
    if role is Role.OBSERVER or (role is Role.SERVER and not request.holds):
        return
    name = job.options.job
    if job.registry.model is None and not job.forgets:
        raise errors.UnavailableError(
            f"this coordinator does not know the job {name!r} in which this {role.value} takes part; "
            "it goes on with that if its servers come"
        )
    what = "holds a shard of" if role is Role.SERVER else "takes part in"
    raise errors.JobFailedError(f"this {role.value} {what} an earlier run of job {name!r}: restart it")


def _check_role(role: Role) -> None:
    """Refuse a role that is not the role of the caller's certificate."""
    identity = caller()
    if identity is None:
        return
    allowed = {role.value, "worker", "admin"} if role is Role.OBSERVER else {role.value}
    if not allowed & identity.roles:
        raise deny("Coordinator.Join", f"a {'/'.join(sorted(identity.roles))} may not join as a {role.value}")


def check_member(job: Job, ident: int) -> None:
    """Raise NotMemberError for a process that is no member."""
    if ident not in job.members:
        raise errors.NotMemberError("this process is not a member (its lease ended): join again")


def check_versions(protocol: int, theirs: Mapping[str, str], role: Role) -> None:
    """Raise VersionMismatchError with a table of both sides if protocol, paramserver or torch differ."""
    mine = versions()
    same = () if role is Role.OBSERVER else _SAME
    differing = [
        name for name in same if name in theirs and theirs[name].partition("+")[0] != mine[name].partition("+")[0]
    ]
    if protocol == PROTOCOL and not differing:
        return
    rows = [("", "coordinator", f"this {role.value}"), ("protocol", str(PROTOCOL), str(protocol))]
    rows += [(name, mine.get(name, "-"), theirs.get(name, "-")) for name in sorted({*mine, *theirs})]
    table = "\n".join(
        f"  {name[:20]:<14}{left[:20]:<20}{right[:20]:<20}{'<- differs' if left != right and name else ''}".rstrip()
        for name, left, right in rows[:20]
    )
    what = ", ".join(differing) if protocol == PROTOCOL else "the protocol"
    raise errors.VersionMismatchError(
        f"versions differ ({what}): install the same version of paramserver and torch on all machines\n{table}"
    )


def _check_settings(job: Job, request: coordinator_pb2.JoinRequest, role: Role) -> None:
    """Refuse a newcomer with other settings than the job. Mode and staleness may also be those of the job's start."""

    def check(setting: str, theirs: object, the_job: str, accepted: bool) -> None:
        if not accepted:
            raise errors.ConfigError(
                f"this {role.value} was started with {setting} = {theirs}, the job {the_job}: use one setting"
            )

    if request.mode != types_pb2.MODE_UNSPECIFIED:
        staleness = request.staleness if request.HasField("staleness") else None
        mode = Mode.ASYNC if request.mode == types_pb2.MODE_ASYNC else Mode.SYNC
        runs = f"runs {job.consistency}"
        same = any(
            request.mode == mode_to_proto(mine.mode) and (mine.mode is Mode.SYNC or staleness == mine.staleness)
            for mine in (job.consistency, job.options.consistency)
        )
        if mode is Mode.ASYNC and job.consistency.mode is Mode.ASYNC:
            check("consistency.staleness", "unbounded" if staleness is None else staleness, runs, same)
        else:
            check("consistency.mode", mode.value, runs, same)
    if request.HasField("slices_per_step"):
        theirs, mine = request.slices_per_step, job.options.step_slices
        check("training.slices_per_step", theirs, f"has {mine}", theirs in (0, mine))
    if request.HasField("seed"):
        theirs, mine = request.seed, job.options.seed
        check("training.seed", theirs, f"has {mine}", theirs == mine)


# ---- seats of servers


async def admit_server(job: Job, request: coordinator_pb2.JoinRequest, wish: int | None) -> Seat:
    """The seat for a server, which is its own now. Raises if the job has no use for the server."""
    newcomer = Newcomer(
        wish,
        request.incarnation,
        request.holds,
        request.timeline,
        known=request.beginning == job.beginning,
        replaces=request.replaces,
    )
    match job.seats.place(newcomer, _facts(job)):
        case Seat(index) as seat:
            _handle(job, Taken(index, with_shard=bool(request.holds)))
            return seat
        case Drop(text):
            log.warning("a server comes back whose shards others hold; it drops them", at=request.address)
            raise errors.RelievedError(text)
        case TryAgain(text):
            raise errors.UnavailableError(text)
        case TooMany(text):
            raise errors.ConfigError(text)
        case Stranger(text):
            raise errors.JobFailedError(text)
        case JobFails(text):
            await job.fail(text)
            raise errors.JobFailedError(job.reason)


def server_gone(job: Job, member: Member, lost: bool, reason: str) -> list[JobFails]:
    """A server is a member no more. If the job fails for that reason, the answer says so, and the caller fails it."""
    covered = job.replication.server_gone(member)
    if covered and member.index < job.options.servers:
        log.warning("a server is gone; backups go on with its shards", server=member.name, reason=reason)
    return _handle(job, Gone(member, lost, reason, _facts(job, covered)))


def _facts(job: Job, covered: bool = False) -> Facts:
    return Facts(
        job=job.options.job,
        servers=job.resizing.seats,
        layout=job.registry.digest,
        timeline=job.timeline,
        can_go_back=job.recovery.possible,
        going_back=job.recovery.under_way,
        over=job.ended or job.over.done(),
        covered=covered,
        spare={*range(job.resizing.seats)} - {*job.holders.primaries},
    )


def _handle(job: Job, event: Event) -> list[JobFails]:
    failures = []
    for effect in job.seats.handle(event, time.monotonic()):
        match effect:
            case Missed(member, reason):
                log.warning(
                    "a server is gone; the job waits for it", server=member.name, at=member.address, reason=reason
                )
            case Back(name, after_s, with_shard):
                tell, text = (log.info, "is back") if with_shard else (log.warning, "has begun anew, without its shard")
                tell(f"a server {text}", server=name, after_s=round(after_s, 1))
            case JobFails():
                failures.append(effect)
    return failures


# ---- the place of checkpoints


async def look_at_place(job: Job, address: str, key: bytes) -> None:
    """See whether the server at ``address`` shares the place of checkpoints with this coordinator.

    Before there is a version, a server that does not is refused: raises as :func:`_probe`. Afterwards the job needs the
    server more than its checkpoints: it is let in, and `status` says why the job is degraded.
    """
    options = job.options
    if not options.checkpoints.place or options.checkpoints.private:
        return
    recovery, loads = job.recovery, job.loads
    begun = job.registry.ready or loads.under_way is not None or (recovery.under_way and not recovery.resuming)
    if not begun:
        try:
            await _probe(job, address, key)
        except errors.ConfigError as error:
            log.error("a server is refused", reason=str(error))
            raise
        return
    looking = job.tasks.begin(_tell_of_place(job, address, key))
    await asyncio.wait({looking}, timeout=_LOOK_S)
    if not looking.done():
        job.checkpoints.overdue.not_shared(address, "the storage is slow or does not answer")


async def _tell_of_place(job: Job, address: str, key: bytes) -> None:
    try:
        await _probe(job, address, key)
    except errors.ParamServerError as error:
        log.warning("a server joins without the place of the checkpoints", at=address, reason=str(error))
        job.checkpoints.overdue.not_shared(address, str(error.__cause__ or error))


async def _probe(job: Job, address: str, key: bytes) -> None:
    """Each of both reads a file that the other has written.

    Raises ConfigError that names the server and says why not; retryable errors if it does not answer.
    """
    options, kept = job.options, job.options.checkpoints
    place = Place(kept.place)
    question = Question(place)
    try:
        await asyncio.to_thread(question.__enter__)
        request = shard_pb2.ProbePlaceRequest(
            job=options.job, place=kept.place, question=question.name, answer=question.answer
        )
        await job.servers.ask(address, "Shard.ProbePlace", request, options.call_timeout_s, key)
        await asyncio.to_thread(question.check)
    except errors.CheckpointError as error:
        reason = (
            f"the server at {address} does not share the place of the checkpoints, {place}, with the coordinator: "
            f"{error}; it has to be one directory, or URL, that all of them can write to"
        )
        raise errors.ConfigError(reason) from error
    finally:
        await asyncio.to_thread(question.__exit__)
