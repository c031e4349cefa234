"""The newest report of each member, and the last report of each process that has left or was lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from paramserver.coordinator import ports
from paramserver.coordinator.watching.main import Main
from paramserver.coordinator.watching.stalls import Stalls
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.job.status import Departure, State, departed_status
from paramserver.core.records.rates import Rates
from paramserver.core.work.slices import assign
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.bounds import MAX_METRICS, MAX_METRICS_BYTES, without

_NAMES = 4
# Texts, metrics and times of all processes that are gone, in the record of the job; and of all processes of the status.
DEPARTED_BYTES = 256 << 10
STATUS_BYTES = 4 << 20
# Of a process of which nothing else is kept.
_NUMBERS = frozenset(
    (
        "role",
        "name",
        "pid",
        "state",
        "member",
        "version",
        "clock",
        "epoch",
        "samples",
        "slices",
        "epochs_planned",
        "gone",
    )
)
_REPORTED = (
    *("version", "clock", "epoch", "samples", "slices", "waiting_for", "transport", "epochs_planned"),
    *("transport_reason", "host_tier", "first_metric", "phase", "phase_s"),
)


class _Job(ports.Stage, Protocol):
    draining: set[int]
    stalls: Stalls
    main: Main

    @property
    def ended(self) -> bool: ...


class Reports:
    """Reports of members, and of processes that are members no more."""

    def __init__(self, job: _Job, losses: int = 0) -> None:
        self._job = job
        # The newest reports, by member number.
        self.workers: dict[int, coordinator_pb2.WorkerReport] = {}
        self.servers: dict[int, Sequence[shard_pb2.StatsResponse]] = {}
        # Samples of workers; bytes of weights and gradients of servers.
        self._rates = Rates()
        # Samples in the checkpoint that the job was told to go on from.
        self.samples_before = 0
        # Members that were lost and that no other process has replaced; and the number of all losses.
        self.lost: list[str] = []
        self.losses = losses
        self._running_at: float | None = None
        self._ended_at: float | None = None
        # Workers that have left, and servers that were lost, by name: with the totals of all processes of this name.
        self._departed: dict[str, coordinator_pb2.ProcessStatus] = {}
        # Workers that were lost or failed and that no other worker has replaced: name to reason.
        self._missed: dict[str, str] = {}
        # Goodbyes of workers that are leaving, by member number.
        self._farewells: dict[int, Departure] = {}

    def hear(self, request: coordinator_pb2.SessionRequest) -> None:
        """A member reports."""
        now = time.monotonic()
        if request.HasField("worker"):
            self.workers[request.member] = request.worker
            self._rates.hear(request.member, request.worker.samples, now)
        if request.shards:
            self.servers[request.member] = request.shards
            sent = sum(shard.bytes_pushed + shard.bytes_pulled for shard in request.shards)
            self._rates.hear(request.member, sent, now)

    def waits(self) -> dict[int, str]:
        """The reasons for which members wait, by member number; empty: the member does not wait."""
        waits = {ident: self._named(combined(reports)) for ident, reports in self.servers.items()}
        return waits | {ident: report.waiting_for for ident, report in self.workers.items()}

    def newest_version(self) -> int:
        """The newest version that a shard has reported."""
        return max((report.version for report in self.shards()), default=0)

    def samples_per_s(self) -> float:
        """Samples per second of all workers together, over the last seconds."""
        now = time.monotonic()
        return sum(self._rates.of(ident, now) for ident in self.workers)

    def shards(self) -> list[shard_pb2.StatsResponse]:
        """The newest reports of all shards, by their primaries."""
        return [report for reports in self.servers.values() for report in reports if not report.backup]

    def admitted(self, member: Member) -> None:
        """A process is a member now, and takes the place of an earlier process of its name."""
        self.lost = [name for name in self.lost if name != member.name]
        self._missed.pop(member.name, None)
        if member.role is Role.SERVER:
            self._departed.pop(member.name, None)

    def leaving(self, member: Member, request: coordinator_pb2.SessionRequest) -> None:
        """A worker says goodbye."""
        told = "it was asked to leave" if member.ident in self._job.draining else ""
        if self._job.life.phase is Phase.STOPPED:
            told = "the job was stopped"
        planned = self.workers[member.ident].epochs_planned if member.ident in self.workers else 0
        self._farewells[member.ident] = Departure("", request.failure, request.finished or request.ended, planned, told)

    def removed(self, member: Member, lost: bool, reason: str) -> None:
        """A process is a member no more. A lost worker is not missed if there are as many as the job began with."""
        enough = member.role is Role.WORKER and len(self._job.members.of(Role.WORKER)) >= self._job.options.workers
        if lost and member.role is not Role.OBSERVER:
            self.losses += 1
            if not enough:
                self.lost.append(member.name)
        farewell = self._farewells.pop(member.ident, Departure())
        if member.role is Role.WORKER or (member.role is Role.SERVER and lost and not self._job.ended):
            gone = self.process(member)
            status = departed_status(Departure(lost=reason) if lost else farewell)
            gone.state, gone.reason, gone.gone = status.state, status.reason, True
            gone.samples_per_s = gone.bytes_per_s = 0.0
            if former := self._departed.get(gone.name):
                _add(gone, former)
            # The last one first, so that it has most of the room.
            self._departed = {gone.name: gone} | {n: one for n, one in self._departed.items() if n != gone.name}
            within(self._departed.values(), DEPARTED_BYTES)
        if member.role is Role.WORKER:
            if gone.state == State.FAILED and not (lost and enough):
                self._missed[gone.name] = gone.reason
            if not self._job.members.of(Role.WORKER):
                self._ended_at = time.monotonic()
        self.workers.pop(member.ident, None)
        self.servers.pop(member.ident, None)
        self._rates.forget(member.ident)

    def script_failed(self, member: Member) -> bool:
        """Whether this worker, which is gone, has ended with an error of its script."""
        gone = self._departed.get(member.name)
        return gone is not None and gone.member == member.ident and gone.state == State.FAILED

    def excuse(self) -> None:
        """Forget the workers that are missed: operators have said how many workers they want."""
        self._missed.clear()
        self.lost = [name for name in self.lost if not name.startswith("worker-")]

    def started(self, before_s: float = 0.0) -> None:
        """The first step begins now, or began ``before_s`` seconds ago."""
        self._running_at = time.monotonic() - before_s

    def resumed(self, samples: int) -> None:
        """The job goes on from a checkpoint in which so many samples have counted."""
        self.samples_before = samples

    def departed(self) -> list[coordinator_pb2.ProcessStatus]:
        """The workers that are gone, and the servers that were lost, by name."""
        return [gone for _, gone in sorted(self._departed.items())]

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write into the record of the job which members are gone, and how long the job has trained."""
        record.departed.extend(self.departed())
        record.training_s, record.samples_before = self.training_s(), self.samples_before
        record.lost.extend(self.lost)
        record.losses = self.losses
        record.missed.extend(self.missed)

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self._departed = {gone.name: gone for gone in record.departed}
        self.samples_before = record.samples_before
        self._missed = {name: gone.reason for name, gone in self._departed.items() if name in record.missed}
        self.lost, self.losses = list(record.lost), record.losses

    def training_s(self) -> float:
        """Seconds from the start of the first step until now, or until the last worker left."""
        if self._running_at is None:
            return 0.0
        everybody_left = self._ended_at is not None and not self._job.members.of(Role.WORKER)
        return (self._ended_at if everybody_left and self._ended_at else time.monotonic()) - self._running_at

    @property
    def missed(self) -> dict[str, str]:
        """Workers that were lost or failed and that no other worker has replaced: name to reason, sorted by name."""
        return dict(sorted(self._missed.items()))

    def process(self, member: Member) -> coordinator_pb2.ProcessStatus:
        """A member and its newest report, without its state."""
        process = coordinator_pb2.ProcessStatus(
            role=member.role.value,
            name=member.name,
            pid=member.pid,
            address=member.address,
            member=member.ident,
            restart_command=member.restart_command,
            metrics_url=member.metrics_url,
        )
        rate = self._rates.of(member.ident, time.monotonic())
        if report := self.workers.get(member.ident):
            process.samples_per_s = rate
            for field in _REPORTED:
                setattr(process, field, getattr(report, field))
            if not report.HasField("clock"):  # it joins at the slowest one
                process.clock = self._slowest_clock()
            process.metrics.update(report.metrics)
            process.phases.CopyFrom(report.phases)
        if reports := self.servers.get(member.ident):
            server = combined(reports)
            process.bytes_per_s = rate
            process.version = server.version
            process.waiting_for = self._named(server)
            process.server.CopyFrom(server)
            for told_once in ("times", "open", "held", "staleness"):
                process.server.ClearField(told_once)
        return process

    def _slowest_clock(self) -> int:
        """Of the workers that have told theirs; 0: none has."""
        reports = (self.workers.get(member.ident) for member in self._job.members.of(Role.WORKER))
        return min((one.clock for one in reports if one is not None and one.HasField("clock")), default=0)

    def with_former(self, process: coordinator_pb2.ProcessStatus) -> None:
        """Add the totals of earlier processes of this name."""
        if former := self._departed.get(process.name):
            _add(process, former)

    def _named(self, server: shard_pb2.StatsResponse) -> str:
        """The reason for which a shard waits, with the names of the workers that it waits for."""
        workers = [m for m in self._job.main.places() if m.ident not in self._job.stalls.members]
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


def within(processes: Iterable[coordinator_pb2.ProcessStatus], most: int) -> None:
    """Keep the numbers of all processes, and what they have said as long as there is room for ``most`` bytes of it."""
    for process in processes:
        size = process.ByteSize()
        if size > most:
            for field, _ in process.ListFields():
                if field.name not in _NUMBERS:
                    process.ClearField(field.name)
        else:
            most -= size


def combined(reports: Sequence[shard_pb2.StatsResponse]) -> shard_pb2.StatsResponse:
    """The reports of a server's shards as one: counters of the shard that is farthest behind, sums of bytes.

    Shards of which the server is a backup count only if there are no others.
    """
    reports = [report for report in reports if not report.backup] or reports
    slowest: shard_pb2.StatsResponse = min(reports, key=lambda report: (report.version, report.applied))
    if len(reports) == 1:
        return slowest
    whole = shard_pb2.StatsResponse()
    whole.CopyFrom(slowest)
    for field in ("shard_bytes", "bytes_pushed", "bytes_pulled"):
        setattr(whole, field, sum(getattr(report, field) for report in reports))
    return whole


def _add(process: coordinator_pb2.ProcessStatus, former: coordinator_pb2.ProcessStatus) -> None:
    """Add the totals of an earlier process of this name to those of ``process``."""
    process.samples += former.samples
    process.slices += former.slices
    for field, seconds in former.phases.ListFields():
        setattr(process.phases, field.name, getattr(process.phases, field.name) + seconds)
    process.epochs_planned = max(process.epochs_planned, former.epochs_planned)
    process.first_metric = process.first_metric or former.first_metric
    for name, value in former.metrics.items():
        if name not in process.metrics:
            process.metrics[name] = value
    for name in without(process.metrics, MAX_METRICS, MAX_METRICS_BYTES):
        del process.metrics[name]
