"""The newest report of each member, and the status that is made of all reports."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paramserver.core.job.membership import Member, Presence, Role
from paramserver.core.job.status import (
    Departure,
    JobFacts,
    MemberFacts,
    Phase,
    State,
    Status,
    departed_status,
    job_status,
    member_status,
)
from paramserver.core.work.slices import assign
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import data_to_proto

if TYPE_CHECKING:
    from paramserver.coordinator.job import Job


_NAMES = 4
_PHASES = {
    types_pb2.JOB_STATE_WAITING: Phase.WAITING,
    types_pb2.JOB_STATE_INITIALISING: Phase.INITIALISING,
    types_pb2.JOB_STATE_RUNNING: Phase.RUNNING,
    types_pb2.JOB_STATE_RECOVERING: Phase.RECOVERING,
    types_pb2.JOB_STATE_FAILED: Phase.FAILED,
    types_pb2.JOB_STATE_DONE: Phase.DONE,
    types_pb2.JOB_STATE_STOPPED: Phase.STOPPED,
}


class Reports:
    """The newest report of every member and of every departed member; makes the status of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reports: dict[int, coordinator_pb2.WorkerReport] = {}
        self._server_reports: dict[int, shard_pb2.StatsResponse] = {}
        self._started_at = time.monotonic()
        self._running_at: float | None = None
        self._ended_at: float | None = None
        # Samples in the checkpoint that the job was told to go on from.
        self.samples_before = 0
        # Workers that are gone, by name, with the totals of all processes that had the name; and lost servers.
        self._departed: dict[str, coordinator_pb2.ProcessStatus] = {}
        # Workers that were lost or failed and that nobody has replaced: name to reason.
        self._missed: dict[str, str] = {}
        # Workers that have said how they leave.
        self._farewells: dict[int, Departure] = {}

    def hear(self, request: coordinator_pb2.SessionRequest) -> None:
        """A member reports."""
        if request.HasField("worker"):
            self._reports[request.member] = request.worker
        if request.HasField("server"):
            self._server_reports[request.member] = request.server

    def worker_reports(self) -> Mapping[int, coordinator_pb2.WorkerReport]:
        """What workers say, by member number."""
        return self._reports

    def server_reports(self) -> Mapping[int, shard_pb2.StatsResponse]:
        """What servers say, by member number."""
        return self._server_reports

    def waits(self) -> dict[int, str]:
        """What members wait for, by member number; empty: nothing."""
        waits = {ident: self._whose(report) for ident, report in self._server_reports.items()}
        return waits | {ident: report.waiting_for for ident, report in self._reports.items()}

    def newest_version(self) -> int:
        """The newest version that some server has told of."""
        return max((report.version for report in self._server_reports.values()), default=0)

    def admitted(self, member: Member) -> None:
        """It is a member now, in place of one of that name that was, if there was any."""
        self._missed.pop(member.name, None)
        if member.role is Role.SERVER:
            self._departed.pop(member.name, None)

    def leaving(self, member: Member, request: coordinator_pb2.SessionRequest) -> None:
        """A worker says goodbye."""
        told = "it was asked to leave" if member.ident in self._job.draining else ""
        if self._job.state == types_pb2.JOB_STATE_STOPPED:
            told = "the job was stopped"
        planned = self._reports[member.ident].epochs_planned if member.ident in self._reports else 0
        self._farewells[member.ident] = Departure("", request.failure, request.finished or request.ended, planned, told)

    def removed(self, member: Member, lost: bool, reason: str) -> None:
        """It is a member no more."""
        farewell = self._farewells.pop(member.ident, Departure())
        if member.role is Role.WORKER or (member.role is Role.SERVER and lost and not self._job.ended):
            gone = self._process(member, self.facts())
            _show(gone, departed_status(Departure(lost=reason) if lost else farewell))
            gone.gone = True
            if former := self._departed.get(gone.name):
                _add(gone, former)
            self._departed[gone.name] = gone
        if member.role is Role.WORKER:
            if gone.state == State.FAILED:
                self._missed[gone.name] = gone.reason
            if not self._job.members.of(Role.WORKER):
                self._ended_at = time.monotonic()
        self._reports.pop(member.ident, None)
        self._server_reports.pop(member.ident, None)

    def script_failed(self, member: Member) -> bool:
        """Whether this worker, which is gone, has ended with an error of its script."""
        gone = self._departed.get(member.name)
        return gone is not None and gone.member == member.ident and gone.state == State.FAILED

    def excuse(self) -> None:
        """The operators have said how many workers they want: those that are gone are missed no more."""
        self._missed.clear()

    def started(self, before_s: float = 0.0) -> None:
        """The first step may begin, or began so many seconds ago."""
        self._running_at = time.monotonic() - before_s

    def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """Everything a status page shows."""
        data = self._job.leasing.data
        response = coordinator_pb2.StatusResponse(
            job=self._job.options.job,
            view=self._job.view(),
            lost=self._job.lost,
            losses=self._job.losses,
            idle=sorted(self._job.idle.ever),
            poisoned=self._job.poison.described(),
            expected_workers=self._job.options.workers,
            expected_servers=self._job.options.servers,
            store=self._job.journal.store_name,
            store_operations=self._job.journal.operations,
            uptime_s=time.monotonic() - self._started_at,
            training_s=self.training_s(),
            term=self._job.term,
            summary=self._job.summary,
            security=self._job.options.security,
            finished=self._job.finished,
            checkpoint=self._job.checkpoints.last,
            rollbacks=self._job.recovery.count,
            steps_redone=self._job.recovery.steps_redone,
            wanted_workers=self._job.scaling.wanted,
            troubles=self._job.promises.troubles,
            broken_promises=self._job.promises.broken,
            closing=self._job.ending.closing,
            not_counted=self._job.ending.not_counted(),
            samples_before=self.samples_before,
            data=data_to_proto(data) if data else None,
            steps_per_epoch=self._job.origin.steps_per_epoch if data and data.slice_size else 0,
        )
        if request.model and self._job.registry.model is not None:
            response.model.CopyFrom(self._job.registry.model)
        facts = self.facts()
        status = job_status(facts)
        response.state, response.reason = status.state, status.reason
        response.processes.append(
            coordinator_pb2.ProcessStatus(
                role="coordinator",
                name="coordinator",
                pid=os.getpid(),
                address=self._job.address,
                state=status.state,
                reason=status.reason,
            )
        )
        for role in (Role.SERVER, Role.WORKER):
            shown = {member.name: self._process(member, facts) for member in self._job.members.of(role)}
            for name, gone in self._departed.items():
                if name in shown:
                    _add(shown[name], gone)
                elif gone.role == role.value:
                    shown[name] = gone
            response.processes.extend(sorted(shown.values(), key=lambda process: int(process.name.rpartition("-")[2])))
        return response

    def facts(self) -> JobFacts:
        """What there is to say of the job."""
        job = self._job
        names = {member.ident: member.name for member in job.members.of(Role.WORKER)}
        return JobFacts(
            phase=_PHASES[job.state],
            reason=job.reason,
            workers=len(names),
            finished=job.finished or (job.ending.script_ended and not names),
            away=[self._away(member) for _, member in sorted(job.watch.absent.items())],
            missed=[
                reason if reason.startswith(name) else f"{name}: {reason}"
                for name, reason in sorted(self._missed.items())
            ],
            stalled=sorted(names[ident] for ident in job.stalls.members if ident in names),
            troubles=list(job.promises.troubles.values()),
            broken=list(job.promises.broken.values()),
            idle=job.idle.sentence(),
            stuck=job.stuck.reason,
        )

    def _away(self, server: Member) -> str:
        if not self._job.recovery.possible:
            return f"{server.name} is lost; there is no checkpoint to go back to, so it has to come back"
        back_to = self._job.checkpoints.last or "the last checkpoint"
        return f"{server.name} is lost; it may come back, or another one takes its place and all go back to {back_to}"

    def departed(self) -> list[coordinator_pb2.ProcessStatus]:
        """The workers that are gone, and the servers that were lost, by name."""
        return [gone for _, gone in sorted(self._departed.items())]

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from what an earlier coordinator has written down."""
        self._departed = {gone.name: gone for gone in record.departed}
        self.samples_before = record.samples_before
        self._missed = {name: gone.reason for name, gone in self._departed.items() if name in record.missed}

    def training_s(self) -> float:
        """Seconds from the start of the first step until now, or until the last worker left."""
        if self._running_at is None:
            return 0.0
        everybody_left = self._ended_at is not None and not self._job.members.of(Role.WORKER)
        return (self._ended_at if everybody_left and self._ended_at else time.monotonic()) - self._running_at

    @property
    def missed(self) -> list[str]:
        """Workers that were lost or failed and that nobody has replaced, by name."""
        return sorted(self._missed)

    def _process(self, member: Member, job: JobFacts) -> coordinator_pb2.ProcessStatus:
        status = coordinator_pb2.ProcessStatus(
            role=member.role.value,
            name=member.name,
            pid=member.pid,
            address=member.address,
            member=member.ident,
        )
        ready, at_work, waiting_for = False, False, job.reason
        if report := self._reports.get(member.ident):
            for field in (
                "version",
                "clock",
                "epoch",
                "samples",
                "slices",
                "waiting_for",
                "transport",
                "epochs_planned",
            ):
                setattr(status, field, getattr(report, field))
            for name, value in report.metrics.items():
                status.metrics[name] = value
            ready, at_work = report.state not in ("joining", "registering", ""), report.at_work
            waiting_for = report.waiting_for
        if server := self._server_reports.get(member.ident):
            status.version = server.version
            status.waiting_for = waiting_for = self._whose(server)
            ready = bool(server.holds)
            status.server.CopyFrom(server)
        facts = MemberFacts(
            job=job,
            silent=member.presence is Presence.SILENT,
            ready=ready,
            waiting_for=waiting_for,
            at_work=at_work,
            stalled=member.ident in self._job.stalls.members,
            draining=member.ident in self._job.draining,
            idle=job.idle if job.idle and member in self._job.idle.members() else "",
        )
        _show(status, member_status(facts))
        return status

    def _whose(self, server: shard_pb2.StatsResponse) -> str:
        """What a shard waits for, with the names of the workers who owe it."""
        workers = [m for m in self._job.members.of(Role.WORKER) if m.ident not in self._job.stalls.members]
        if not workers:
            return ""
        if not server.missing_of:
            everybody = server.waiting_for.endswith(": all slices")
            names = [worker.name for worker in workers[:_NAMES]] + ["..."] * (len(workers) > _NAMES)
            return f"{server.waiting_for} ({', '.join(names)})" if everybody else server.waiting_for
        gaps = [(gap.start, gap.stop) for gap in server.missing]
        owing = [
            worker.name
            for worker, (lo, hi) in zip(workers, assign(server.missing_of, len(workers)), strict=True)
            if any(start < hi and lo < stop for start, stop in gaps)
        ]
        return f"{server.waiting_for} ({', '.join(owing)})"


def _show(process: coordinator_pb2.ProcessStatus, status: Status) -> None:
    process.state, process.reason = status.state, status.reason


def _add(process: coordinator_pb2.ProcessStatus, former: coordinator_pb2.ProcessStatus) -> None:
    """Add to a process what those before it under its name did: that still counts in the totals."""
    process.samples += former.samples
    process.slices += former.slices
    process.epochs_planned = max(process.epochs_planned, former.epochs_planned)
    for name, value in former.metrics.items():
        if name not in process.metrics:
            process.metrics[name] = value
