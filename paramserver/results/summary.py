"""The summary of a run, as ``--summary FILE`` writes it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver import errors
from paramserver.config import Run
from paramserver.results.collect import Result
from paramserver.results.verdict import broken_sentences
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.blame import describe_blame, describe_phases
from paramserver.wire.messages import data_from_proto


def summarise(
    status: coordinator_pb2.StatusResponse,
    servers: Iterable[shard_pb2.StatsResponse],
    result: Result,
    restarts: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """All entries of a summary. ``servers``: the present counts of the shards. ``status``: of the coordinator.

    ``restarts``: how often processes were started again, by name; None if no launcher starts them again.
    """
    shards = list(servers)
    workers = [process for process in status.processes if process.role == "worker"]
    # Samples that counted: workers may have computed slices that other workers handed in first.
    samples = min((shard.samples for shard in shards), default=0)
    seconds = status.training_s
    consistency = status.view.consistency
    return {
        "job": status.job,
        "state": "stopped" if status.view.state == types_pb2.JOB_STATE_STOPPED else "done",
        "mode": "async" if consistency.mode == types_pb2.MODE_ASYNC else "sync",
        "staleness": staleness_of(consistency),
        "servers": status.expected_servers,
        "workers": status.expected_workers,
        "slices_per_step": status.view.slices_per_step,
        "steps": result.version,
        "epochs": epochs_made(status, shards),
        "epochs_planned": max((process.epochs_planned for process in workers), default=0),
        "seconds": round(seconds, 3),
        "samples": samples,
        # In the checkpoint that the job was told to go on from; `seconds` and `samples_per_s` are of this run alone.
        "samples_before": status.samples_before,
        "samples_per_s": round(max(0, samples - status.samples_before) / seconds, 1) if seconds > 0 else 0.0,
        "metrics": metrics_of(workers),
        "weights_sha256": result.weights_sha256(),
        "buffers_sha256": result.buffers_sha256(),
        "optimizer_sha256": result.optimizer_sha256(),
        "bytes_pushed": sum(shard.bytes_pushed for shard in shards),
        "bytes_pulled": sum(shard.bytes_pulled for shard in shards),
        # Every shard counts every slice, so the shards agree. If one is behind, the lower number is the right one.
        "contributions_applied": min((shard.applied for shard in shards), default=0),
        "contributions_duplicate": max((shard.duplicate for shard in shards), default=0),
        # By reason; see docs/training.md.
        "contributions_not_counted": not_counted(status, shards),
        "steps_skipped": max((shard.skipped for shard in shards), default=0),
        "max_clock_spread": max((shard.max_clock_spread for shard in shards), default=0),
        "restarts": dict(restarts or {}),
        "losses": status.losses,
        # How often backups took over from a lost server, and how often all shards had all their backups again after it.
        "takeovers": status.takeovers,
        "repairs": status.repairs,
        # Names of workers that had no slices at some time: a step had fewer slices than there were workers.
        "idle_workers": list(status.idle),
        # In words, slices that counted without their samples, since they killed the workers that computed them.
        "poisoned_slices": list(status.poisoned),
        # Slices that two workers computed (training.audit), and how many of them came out differently.
        "audit": {"compared": status.audit.compared, "differ": status.audit.differ},
        # The steps that waited noticeably for a worker or a server, and why; see docs/blame.md.
        "blame": blame_of(status),
        "timeline": status.view.timeline,
        "rollbacks": status.rollbacks,
        "steps_redone": status.steps_redone,
        "checkpoint": status.checkpoint,
        # Seconds that updates have waited for checkpoints, and that writing these took beside training.
        "checkpoint_pause_s": round(max((shard.checkpoint_pause_s for shard in shards), default=0.0), 4),
        "checkpoint_write_s": round(max((shard.checkpoint_write_s for shard in shards), default=0.0), 4),
        # Sentences; if there is any, the run ends with exit code 1.
        "broken_promises": broken_sentences(status.broken_promises),
    }


def staleness_of(consistency: types_pb2.Consistency) -> int | str | None:
    """How many slices a worker may be ahead, or "unbounded"; None in synchronous mode."""
    if consistency.mode != types_pb2.MODE_ASYNC:
        return None
    return consistency.staleness if consistency.HasField("staleness") else "unbounded"


def blame_of(status: coordinator_pb2.StatusResponse) -> dict[str, Any]:
    """Workers and servers that made steps wait: the worst steps, workers held at the bound, phases of workers."""
    workers = [process for process in status.processes if process.role == "worker"]
    return describe_blame(status.blame) | {
        "phases": {process.name: describe_phases(process.phases) for process in workers}
    }


def epochs_made(status: coordinator_pb2.StatusResponse, servers: Iterable[shard_pb2.StatsResponse]) -> int:
    """How many epochs have counted in full; of a job without a data set, as many as were planned."""
    planned = max((process.epochs_planned for process in status.processes), default=0)
    slices = data_from_proto(status.data).slices_per_epoch if status.data.slice_size else 0
    if status.finished or not slices:
        return planned
    return min((server.applied for server in servers), default=0) // slices


def not_counted(status: coordinator_pb2.StatusResponse, shards: Sequence[shard_pb2.StatsResponse]) -> dict[str, int]:
    """By reason, how many contributions did not count; reasons that did not occur are left out."""
    open_slices = [
        shard.missing_of - sum(gap.stop - gap.start for gap in shard.missing) for shard in shards if shard.missing_of
    ]
    found = {"incomplete": max(open_slices, default=0)}
    if status.data.slice_size:  # equal names are equal work: the second contribution is no loss
        found["duplicate"] = max((shard.duplicate for shard in shards), default=0)
        found["refused"] = max((shard.refused for shard in shards), default=0)
    found.update(status.not_counted)
    return {reason: number for reason, number in sorted(found.items()) if number}


def metrics_of(workers: Iterable[coordinator_pb2.ProcessStatus]) -> dict[str, float]:
    """The last value of each metric of the script, by name. Of several workers, the lowest rank counts."""
    metrics: dict[str, float] = {}
    for process in sorted(workers, key=lambda p: int(p.name.rpartition("-")[2]), reverse=True):
        metrics.update(process.metrics)
    return metrics


def check_writable(run: Run) -> None:
    """Raises UserError if summary or weights cannot be written: before hours of training, not after them."""
    for setting, name in (("run.summary", run.summary), ("run.save", run.save)):
        path = Path(name)
        if not name:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.exists() and not path.is_file():
                raise errors.UserError(f"{setting} is {path}, which is a device or the like: name a file")
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise errors.UserError(f"{setting} cannot be written to {path}: {error.strerror or error}") from error


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write the JSON file whole or not at all. Raises UserError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(summary, indent=2) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise errors.UserError(f"the summary cannot be written to {path}: {error.strerror or error}") from error
