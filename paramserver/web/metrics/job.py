"""The metrics of a job, in one table; `samples` computes all of them from a status when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paramserver.core.job.status import State
from paramserver.web.metrics.table import Metric, Sample, Samples, gathered
from paramserver.web.models import Event, Process, Status

_SHARDS = ("replicated", "catching up", "no backup", "lost")

METRICS = (
    Metric("leads", "gauge", "1 if this coordinator leads the job. The others show nothing else."),
    Metric("job_state", "gauge", "1 for the state that the job is in, 0 for the other states.", ("state",)),
    Metric("version", "gauge", "Newest version of the weights."),
    Metric("epoch", "gauge", "Epoch of the slowest worker, from 0."),
    Metric("slices_done", "gauge", "Slices that have counted."),
    Metric("slices_planned", "gauge", "Slices of all epochs; 0 if that is not known."),
    Metric("samples", "counter", "Samples that workers have computed."),
    Metric("samples_per_second", "gauge", "Samples per second of all workers, over the last seconds."),
    Metric("value", "gauge", "Newest value of ctx.log by its name, the mean over the workers.", ("key",)),
    Metric("staleness_bound", "gauge", "How far a worker may be ahead; only in asynchronous mode with a bound."),
    Metric("clock_spread", "gauge", "Slices between the fastest and the slowest worker; only in asynchronous mode."),
    Metric("members", "gauge", "Servers and workers that are there.", ("role",)),
    Metric("members_expected", "gauge", "Servers and workers that the job began with.", ("role",)),
    Metric("process_state", "gauge", "1 for the state that a process is in.", ("role", "name", "state")),
    Metric("worker_samples_per_second", "gauge", "Samples per second of a worker.", ("name",)),
    Metric("worker_clock", "gauge", "Slices that a worker has finished.", ("name",)),
    Metric("server_received_bytes", "counter", "Bytes of gradients that a server has received.", ("name",)),
    Metric("server_sent_bytes", "counter", "Bytes of weights that a server has sent.", ("name",)),
    Metric("server_contributions", "counter", "Contributions to a server by their outcome.", ("name", "outcome")),
    Metric("shards", "gauge", "Shards by the state of their copies; only jobs with replicas.", ("state",)),
    Metric("losses", "counter", "Members that were lost."),
    Metric("takeovers", "counter", "Takeovers by backups; only jobs with replicas."),
    Metric("rollbacks", "counter", "Returns of the job to a checkpoint."),
    Metric("steps_redone", "counter", "Steps that had to be done again."),
    Metric("last_checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was complete, if that is known."),
    Metric("trouble", "gauge", "1 for each thing that is wrong now.", ("trouble",)),
    Metric("broken_promises", "gauge", "Promises that the job cannot keep any more."),
    Metric("uptime_seconds", "gauge", "Age of the coordinator's process."),
)


def samples(status: Status, events: Iterable[Event]) -> Samples:
    """The values of each metric."""
    return gathered(METRICS, _all(status, events))


def _all(status: Status, events: Iterable[Event]) -> Iterator[Sample]:
    yield "leads", (), status.term > 0
    if not status.term:
        return
    for state in State:
        yield "job_state", (str(state),), status.state == state
    for name in ("version", "epoch", "slices_done", "slices_planned", "samples", "losses", "rollbacks", "steps_redone"):
        yield name, (), getattr(status, name)
    yield "samples_per_second", (), status.samples_per_s
    yield "uptime_seconds", (), status.uptime_s
    yield "broken_promises", (), len(status.broken_promises)
    for key, value in status.metrics.items():
        yield "value", (key,), value
    for key in status.troubles:
        yield "trouble", (key,), 1
    for role, expected in (("server", status.expected_servers), ("worker", status.expected_workers)):
        yield "members", (role,), sum(p.role == role and not p.gone for p in status.processes)
        yield "members_expected", (role,), expected
    if status.shards is not None:
        yield "takeovers", (), status.takeovers or 0
        for cover in _SHARDS:
            yield "shards", (cover,), sum(shard.state == cover for shard in status.shards)
    saved = [event.at_s for event in events if event.kind == "checkpoint"]
    if saved:
        yield "last_checkpoint_timestamp_seconds", (), saved[-1]
    yield from _clocks(status)
    for process in status.processes:
        yield from _process(process)


def _clocks(status: Status) -> Iterator[Sample]:
    if status.mode != "async":
        return
    if isinstance(status.staleness, int):
        yield "staleness_bound", (), status.staleness
    clocks = [process.clock for process in status.processes if process.role == "worker" and not process.gone]
    if clocks:
        yield "clock_spread", (), max(clocks) - min(clocks)


def _process(process: Process) -> Iterator[Sample]:
    yield "process_state", (process.role, process.name, process.state), 1
    if process.role == "worker" and not process.gone:
        yield "worker_samples_per_second", (process.name,), process.samples_per_s
        yield "worker_clock", (process.name,), process.clock
    if process.server is not None:
        yield "server_received_bytes", (process.name,), process.server.bytes_pushed
        yield "server_sent_bytes", (process.name,), process.server.bytes_pulled
        for outcome in ("applied", "duplicate", "skipped", "refused"):
            yield "server_contributions", (process.name, outcome), getattr(process.server, outcome)
