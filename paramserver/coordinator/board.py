"""What members report, and what a status page shows of it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from paramserver.core.membership import Member, Role
from paramserver.core.slices import assign
from paramserver.transport.messages import data_to_proto
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

if TYPE_CHECKING:
    from paramserver.coordinator.job import Job


class Board:
    """The newest report of every member, and of the workers that are gone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reports: dict[int, coordinator_pb2.WorkerReport] = {}
        self._server_reports: dict[int, shard_pb2.StatsResponse] = {}
        self._started_at = time.monotonic()
        self._running_at: float | None = None
        self._ended_at: float | None = None
        # Workers that are gone, by name and pid (0: several of them): what they did still counts in the totals.
        self._departed: dict[tuple[str, int], coordinator_pb2.ProcessStatus] = {}

    def hear(self, request: coordinator_pb2.SessionRequest) -> None:
        """A member reports."""
        if request.HasField("worker"):
            self._reports[request.member] = request.worker
        if request.HasField("server"):
            self._server_reports[request.member] = request.server

    def newest_version(self) -> int:
        """The newest version that some server has told of."""
        return max((report.version for report in self._server_reports.values()), default=0)

    def removed(self, member: Member, lost: bool) -> None:
        """It is a member no more."""
        if member.role is Role.WORKER:
            gone = self._process(member)
            gone.state = "lost" if lost else "done"
            self._depart(gone)
            if not self._job.members.of(Role.WORKER):
                self._ended_at = time.monotonic()
        self._reports.pop(member.ident, None)
        self._server_reports.pop(member.ident, None)

    def _depart(self, gone: coordinator_pb2.ProcessStatus) -> None:
        """Keep the latest process of each name, and one sum of those before it: many may come and go."""
        for name, pid in [key for key in self._departed if key[0] == gone.name and key[1] not in (0, gone.pid)]:
            former = self._departed.pop((name, pid))
            total = self._departed.setdefault(
                (name, 0), coordinator_pb2.ProcessStatus(role=former.role, name=name, state=former.state)
            )
            total.samples += former.samples
            total.slices += former.slices
            total.epochs_planned = max(total.epochs_planned, former.epochs_planned)
        self._departed[(gone.name, gone.pid)] = gone

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
            data=data_to_proto(data) if data else None,
            steps_per_epoch=self._job.origin.steps_per_epoch if data and data.slice_size else 0,
        )
        if request.model and self._job.registry.model is not None:
            response.model.CopyFrom(self._job.registry.model)
        response.processes.append(
            coordinator_pb2.ProcessStatus(
                role="coordinator",
                name="coordinator",
                pid=os.getpid(),
                address=self._job.address,
                state=types_pb2.JobState.Name(self._job.state).removeprefix("JOB_STATE_").lower(),
            )
        )
        for role in (Role.SERVER, Role.WORKER):
            response.processes.extend(self._process(member) for member in self._job.members.of(role))
        present = {(process.name, process.pid) for process in response.processes}
        response.processes.extend(gone for key, gone in sorted(self._departed.items()) if key not in present)
        return response

    def departed(self) -> list[coordinator_pb2.ProcessStatus]:
        """The workers that are gone."""
        return [gone for _, gone in sorted(self._departed.items())]

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from what an earlier coordinator has written down."""
        self._departed = {(gone.name, gone.pid): gone for gone in record.departed}

    def training_s(self) -> float:
        """Seconds from the start of the first step until now, or until the last worker left."""
        if self._running_at is None:
            return 0.0
        everybody_left = self._ended_at is not None and not self._job.members.of(Role.WORKER)
        return (self._ended_at if everybody_left and self._ended_at else time.monotonic()) - self._running_at

    def _process(self, member: Member) -> coordinator_pb2.ProcessStatus:
        status = coordinator_pb2.ProcessStatus(
            role=member.role.value,
            name=member.name,
            pid=member.pid,
            address=member.address,
            member=member.ident,
            state=member.presence.value,
        )
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
            status.state = report.state or status.state
            if member.ident in self._job.stalls.members:
                status.state = "stalled"
            for name, value in report.metrics.items():
                status.metrics[name] = value
        if server := self._server_reports.get(member.ident):
            status.version = server.version
            status.waiting_for = self._whose(server)
            status.state = "serving" if server.timeline or server.shard_bytes else "waiting"
            status.server.CopyFrom(server)
        return status

    def _whose(self, server: shard_pb2.StatsResponse) -> str:
        """What a shard waits for, with the names of the workers who owe it."""
        workers = [m for m in self._job.members.of(Role.WORKER) if m.ident not in self._job.stalls.members]
        if not workers:
            return ""
        if not server.missing_of:
            return server.waiting_for
        gaps = [(gap.start, gap.stop) for gap in server.missing]
        owing = [
            worker.name
            for worker, (lo, hi) in zip(workers, assign(server.missing_of, len(workers)), strict=True)
            if any(start < hi and lo < stop for start, stop in gaps)
        ]
        return f"{server.waiting_for} ({', '.join(owing)})"
