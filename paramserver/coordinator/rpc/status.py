"""The status page: the state of the job and of each process, with reasons."""

from __future__ import annotations

import os
import time

from paramserver.coordinator.job import Job
from paramserver.coordinator.reports import STATUS_BYTES, within
from paramserver.coordinator.rpc.copies import heirs, shard_statuses, unprotected
from paramserver.core.job.membership import Member, Presence, Role
from paramserver.core.job.status import JobFacts, MemberFacts, again, job_status, member_status, result_of
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2
from paramserver.wire.messages import data_to_proto

# Workers that are gone of which the reason of a state tells one by one.
_MISSED = 20


def status_page(job: Job, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
    """Everything that a status page shows."""
    data = job.schedule.data
    facts = job_facts(job)
    if job.ending.how is not None:
        facts = JobFacts(job.ending.how, result_of(job.ending.said))
    status = job_status(facts)
    response = coordinator_pb2.StatusResponse(
        job=job.options.job,
        view=job.view(),
        lost=job.reports.lost,
        losses=job.reports.losses,
        idle=sorted(job.idle.ever),
        poisoned=job.poison.described(),
        expected_workers=job.options.workers,
        expected_servers=job.options.servers,
        store=job.journal.store_name,
        store_operations=job.journal.operations,
        uptime_s=time.monotonic() - job.began_at,
        training_s=job.reports.training_s(),
        term=job.term,
        summary=job.life.summary,
        security=job.options.security,
        finished=job.ending.finished,
        checkpoint=job.checkpoints.last,
        rollbacks=job.recovery.count,
        steps_redone=job.recovery.steps_redone,
        wanted_workers=job.scaling.wanted,
        troubles=job.promises.troubles,
        broken_promises=job.promises.broken,
        closing=job.ending.closing,
        not_counted=job.ending.not_counted(),
        samples_before=job.reports.samples_before,
        shards=len(job.holders),
        data=data_to_proto(data) if data else None,
        steps_per_epoch=job.schedule.origin.steps_per_epoch if data and data.slice_size else 0,
        model=job.registry.model if request.model else None,
        state=status.state,
        reason=status.reason,
        holders=shard_statuses(job),
        takeovers=job.holders.takeovers,
        repairs=job.holders.repairs,
        blame=job.blame.page(),
        wanted_servers=job.resizing.seats,
        events=job.events.events() if request.events else (),
        dashboard=job.dashboard,
        said=job.ending.said,
        audit=job.audit.message(),
    )
    response.processes.add(
        role="coordinator",
        name="coordinator",
        pid=os.getpid(),
        address=job.address,
        state=status.state,
        reason=status.reason,
    )
    for role in (Role.SERVER, Role.WORKER):
        shown = {gone.name: _departed(job, gone) for gone in job.reports.departed() if gone.role == role.value}
        shown |= {member.name: _process(job, member, facts) for member in job.members.of(role)}
        response.processes.extend(sorted(shown.values(), key=lambda process: int(process.name.rpartition("-")[2])))
    within(response.processes, STATUS_BYTES)
    of_step = job.options.step_slices
    slices = of_step if job.consistency.mode is Mode.SYNC else 1
    scaling, version = job.options.lr_scaling, max((process.version for process in response.processes), default=0)
    response.effective_batch = slices * data.slice_size if data else 0
    response.lr_factor, response.lr_factor_whole = (
        scaling.factor(slices, of_step, version),
        scaling.whole(slices, of_step),
    )
    response.samples_per_s = job.reports.samples_per_s()
    if request.report:
        response.history.CopyFrom(job.course.tell(request.since_s))
    return response


def job_facts(job: Job) -> JobFacts:
    """The facts from which the state of the job follows."""
    names = {member.ident: member.name for member in job.members.of(Role.WORKER)}
    commands = {gone.name: gone.restart_command for gone in job.reports.departed()}
    missed = list(job.reports.missed.items())
    return JobFacts(
        phase=job.life.phase,
        reason=job.reason,
        workers=len(names),
        finished=job.ending.finished or (job.ending.script_ended and not names),
        away=[_away(job, away.member) + again(away.member.restart_command) for away in job.seats.away],
        unprotected=unprotected(job),
        missed=[
            (reason if reason.startswith(name) else f"{name}: {reason}") + again(commands.get(name, ""))
            for name, reason in missed[:_MISSED]
        ]
        + ([f"{len(missed) - _MISSED} more workers are missing"] if len(missed) > _MISSED else []),
        stalled=sorted(names[ident] for ident in job.stalls.members if ident in names),
        troubles=list(job.promises.troubles.values()),
        broken=list(job.promises.broken.values()),
        idle=job.idle.sentence(),
        stuck=job.stuck.reason,
        ranks=job.options.workers == 0,
    )


def _away(job: Job, server: Member) -> str:
    if not job.recovery.possible:
        return f"{server.name} is lost; there is no checkpoint to go back to, so it has to come back"
    back_to = job.checkpoints.last or "the last checkpoint"
    then = f"all go back to {back_to}" if job.registry.ready else "version 0 is uploaded again"
    return f"{server.name} is lost; it may come back, or another one takes its place and {then}"


def _departed(job: Job, gone: coordinator_pb2.ProcessStatus) -> coordinator_pb2.ProcessStatus:
    """A process that is gone; of a server whose shards others hold, also which ones."""
    if gone.role != Role.SERVER.value or not (held := heirs(job, gone.name)):
        return gone
    process = coordinator_pb2.ProcessStatus()
    process.CopyFrom(gone)
    process.reason = f"{gone.reason}; {held}"
    return process


def _process(job: Job, member: Member, facts: JobFacts) -> coordinator_pb2.ProcessStatus:
    process = job.reports.process(member)
    ready, at_work, waiting_for = False, False, job.reason
    if report := job.reports.workers.get(member.ident):
        ready, at_work = report.state not in ("joining", "registering", ""), report.at_work
        waiting_for = report.waiting_for
    if shards := job.reports.servers.get(member.ident):
        ready, waiting_for = bool(shards[0].holds), process.waiting_for
    status = member_status(
        MemberFacts(
            job=facts,
            silent=member.presence is Presence.SILENT,
            silent_s=job.members.silent_s(member.ident, time.monotonic()),
            ready=ready,
            waiting_for=waiting_for,
            at_work=at_work,
            stalled=member.ident in job.stalls.members,
            draining=member.ident in job.draining,
            idle=facts.idle if facts.idle and member in job.idle.members() else "",
        )
    )
    process.state, process.reason = status.state, status.reason
    job.reports.with_former(process)
    return process
