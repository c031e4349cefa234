"""The metrics of a server or a worker about itself, computed from its report when somebody scrapes.

The coordinator shows the whole job under other names (`job.METRICS`), so that nothing is added up twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.web.metrics.table import Metric, Sample, Samples, gathered

MEMBER = (Metric("member", "gauge", "1 if this process is a member of the job, 0 while it joins.", ("role", "name")),)
SERVER = (
    *MEMBER,
    Metric("shard_version", "gauge", "Newest version of a shard.", ("shard", "copy")),
    Metric("shard_weight_bytes", "gauge", "Bytes of the weights of a shard.", ("shard", "copy")),
    Metric("shard_contributions", "counter", "Contributions to a shard by their outcome.", ("shard", "outcome")),
    Metric("shard_received_bytes", "counter", "Bytes of gradients that a shard has received.", ("shard",)),
    Metric("shard_sent_bytes", "counter", "Bytes of weights that a shard has sent.", ("shard",)),
    Metric("shard_samples", "counter", "Samples in the versions of a shard.", ("shard",)),
    Metric("shard_missing_slices", "gauge", "Slices that the open step of a shard lacks.", ("shard",)),
    Metric("shard_backups", "gauge", "Whole backups that the primary of a shard has.", ("shard",)),
    Metric(
        "shard_checkpoint_pause_seconds", "counter", "Time that steps have waited for copies of a shard.", ("shard",)
    ),
    Metric("shard_checkpoint_write_seconds", "counter", "Time that writing checkpoints of a shard took.", ("shard",)),
)
WORKER = (
    *MEMBER,
    Metric("worker_state", "gauge", "1 for the state that the script is in.", ("state",)),
    Metric("worker_version", "gauge", "Version of the weights that the worker has."),
    Metric("worker_epoch", "gauge", "Epoch that the script is in, from 0."),
    Metric("worker_slices", "counter", "Slices that this process has computed."),
    Metric("worker_samples", "counter", "Samples that this process has computed."),
    Metric("worker_slice_seconds", "gauge", "Time that a slice usually takes the script; 0 if that is not known."),
    Metric("worker_at_work", "gauge", "1 if it is the script's turn, 0 if the worker waits for others."),
    Metric("worker_value", "gauge", "Newest value of ctx.log by its name.", ("key",)),
)

# The columns of `shard_contributions`.
_OUTCOMES = ("applied", "duplicate", "skipped", "refused")


def server_samples(name: str, reports: Iterable[shard_pb2.StatsResponse]) -> Samples:
    """The samples of a server. ``name``: empty until it is a member; ``reports``: of its shards."""
    return gathered(SERVER, _server(name, reports))


def worker_samples(name: str, report: coordinator_pb2.WorkerReport) -> Samples:
    """The samples of a worker. ``name``: empty until it is a member."""
    return gathered(WORKER, _worker(name, report))


def _server(name: str, reports: Iterable[shard_pb2.StatsResponse]) -> Iterator[Sample]:
    yield "member", ("server", name), bool(name)
    for report in reports:
        if not report.holds:  # no shard yet
            continue
        shard, copy = str(report.shard), "backup" if report.backup else "primary"
        yield "shard_version", (shard, copy), report.version
        yield "shard_weight_bytes", (shard, copy), report.shard_bytes
        for outcome in _OUTCOMES:
            yield "shard_contributions", (shard, outcome), getattr(report, outcome)
        yield "shard_received_bytes", (shard,), report.bytes_pushed
        yield "shard_sent_bytes", (shard,), report.bytes_pulled
        yield "shard_samples", (shard,), report.samples
        yield "shard_checkpoint_pause_seconds", (shard,), report.checkpoint_pause_s
        yield "shard_checkpoint_write_seconds", (shard,), report.checkpoint_write_s
        if not report.backup:
            missing = sum(part.stop - part.start for part in report.missing)
            yield "shard_missing_slices", (shard,), missing
            yield "shard_backups", (shard,), sum(one.whole for one in report.backups)


def _worker(name: str, report: coordinator_pb2.WorkerReport) -> Iterator[Sample]:
    yield "member", ("worker", name), bool(name)
    yield "worker_state", (report.state,), 1
    yield "worker_version", (), report.version
    yield "worker_epoch", (), report.epoch
    yield "worker_slices", (), report.slices
    yield "worker_samples", (), report.samples
    yield "worker_slice_seconds", (), report.slice_s
    yield "worker_at_work", (), report.at_work
    for key, value in report.metrics.items():
        yield "worker_value", (key,), value
