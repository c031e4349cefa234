"""The coordinator's answers as models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paramserver.core.blame.spent import LOSSES, PHASES
from paramserver.core.job.status import State
from paramserver.core.work.slices import DataSpec
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.web.models import (
    Backup,
    Event,
    HeldWorker,
    Ledger,
    LedgerEpoch,
    Process,
    ServerCounts,
    Shard,
    Staleness,
    Status,
    WaitedStep,
    Waits,
)

_SAME = (
    *("job", "state", "reason", "term", "security", "steps_per_epoch", "expected_servers", "expected_workers"),
    *("losses", "checkpoint", "rollbacks", "steps_redone", "store", "store_operations", "uptime_s", "samples_per_s"),
    *("dashboard", "effective_batch", "lr_factor", "lr_factor_whole"),
)
_ENDED = {State.DONE: "is done", State.FAILED: "has failed", State.STOPPED: "was stopped"}
_PROCESS = tuple(name for name in Process.model_fields if name not in ("metrics", "phases", "server"))


def status_of(response: coordinator_pb2.StatusResponse) -> Status:
    """The status of a job."""
    view = response.view
    mode, staleness = consistency_of(view.consistency)
    workers = [process for process in response.processes if process.role == "worker"]
    there = [worker for worker in workers if not worker.gone] or workers
    done, planned = progress_of(response)
    facts: dict[str, Any] = {name: getattr(response, name) for name in _SAME}
    for name in ("troubles", "broken_promises"):
        facts[name] = dict(sorted(getattr(response, name).items()))
    if response.holders:
        shards = [_shard(shard) for shard in response.holders]
        facts |= {"takeovers": response.takeovers, "repairs": response.repairs, "shards": shards}
    return Status(
        **facts,
        sentence=sentence(response, mode, staleness),
        mode=mode,
        staleness=staleness,
        version=max((process.version for process in response.processes), default=0),
        epoch=(min if any(not worker.gone for worker in there) else max)((worker.epoch for worker in there), default=0),
        epochs=max((worker.epochs_planned for worker in workers), default=0),
        slices_done=done,
        slices_planned=planned,
        samples=sum(worker.samples for worker in workers),
        metrics=means(worker.metrics for worker in there),
        blame=[said for said in (response.blame.sentence, response.blame.chronic) if said],
        waits=_waits(response.blame),
        generation=view.generation,
        timeline=view.timeline,
        slices_per_step=view.slices_per_step,
        poisoned_slices=list(response.poisoned),
        lost=list(response.lost),
        said=list(response.said),
        processes=[_process(process) for process in response.processes],
    )


def sentence(response: coordinator_pb2.StatusResponse, mode: str | None, staleness: Staleness | None) -> str:
    """The state of the job in one sentence."""
    workers = sum(process.role == "worker" and not process.gone for process in response.processes)
    servers = sum(process.role == "server" and not process.gone for process in response.processes)
    how = "in synchronous mode" if mode == "sync" else f"in asynchronous mode with staleness {staleness}"
    team = f"{_number(workers, 'worker')} and {_number(servers, 'server')}"
    if response.state in _ENDED:
        said, team = f"Job {response.job} {_ENDED[State(response.state)]}", ""
    elif response.state == State.TRAINING and workers:
        said = f"Job {response.job} is training {how} with {team}"
    else:
        said = f"Job {response.job} is {response.state or 'in a state that is not known'}, with {team}"
    return f"{said}: {response.reason.removesuffix('.')}." if response.reason else f"{said}."


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def progress_of(status: coordinator_pb2.StatusResponse) -> tuple[int, int]:
    """(slices counted, of how many in all epochs); (0, 0) if that is not known."""
    epochs = max((p.epochs_planned for p in status.processes), default=0)
    data = status.data
    if not epochs or not data.slice_size:
        return 0, 0
    numbers = data.batches or 1, data.slices_per_step, data.drawn, data.turns or 1
    of = DataSpec(data.samples, data.slice_size, data.drop_last, data.shuffle, *numbers)
    slices = of.slices_per_epoch
    counted = max((p.server.applied for p in status.processes if p.role == "server"), default=0)
    return min(counted, slices * epochs), slices * epochs


def consistency_of(consistency: types_pb2.Consistency) -> tuple[str | None, Staleness | None]:
    """Mode, and staleness: a number or "unbounded" in asynchronous mode, None in synchronous mode."""
    # A mode that this version does not know has no name.
    known = types_pb2.Mode.DESCRIPTOR.values_by_number.get(consistency.mode) if consistency.mode else None
    mode = str(known.name).removeprefix("MODE_").lower() if known is not None else None
    if mode != "async":
        return mode, None
    return mode, int(consistency.staleness) if consistency.HasField("staleness") else "unbounded"


def means(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """For each name the mean over those that have it, sorted by name."""
    found: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {
        name: math.fsum(values) / len(values) if _finite(values) else math.nan for name, values in sorted(found.items())
    }


def _finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def _process(process: coordinator_pb2.ProcessStatus) -> Process:
    counts = None
    if process.HasField("server"):
        counts = ServerCounts(**{name: getattr(process.server, name) for name in ServerCounts.model_fields})
    same: dict[str, Any] = {name: getattr(process, name) for name in _PROCESS}
    if process.HasField("phases"):
        same["phases"] = {name: round(getattr(process.phases, f"{name}_s"), 4) for name in (*PHASES, *LOSSES)}
    return Process(**same, metrics=dict(sorted(process.metrics.items())), server=counts)


def _waits(blame: coordinator_pb2.Blame) -> Waits:
    return Waits(
        worst=[WaitedStep(**{name: getattr(one, name) for name in WaitedStep.model_fields}) for one in blame.worst],
        held=[HeldWorker(**{name: getattr(one, name) for name in HeldWorker.model_fields}) for one in blame.held],
        staleness=list(blame.staleness),
        steps=blame.steps,
        waited_s=blame.waited_s,
        usual_s=blame.usual_s,
    )


def _shard(shard: coordinator_pb2.ShardStatus) -> Shard:
    backups = [Backup(server=one.server, whole=one.whole, share=one.share) for one in shard.backups]
    return Shard(shard=shard.shard, state=shard.state, primary=shard.primary, backups=backups)


def events_of(response: coordinator_pb2.StatusResponse) -> list[Event]:
    """The newest events, oldest first."""
    return [
        Event(at_s=one.at_s, kind=one.kind, subject=one.subject, text=one.text, version=one.version)
        for one in response.events
    ]


def ledger_of(found: coordinator_pb2.AccountsResponse) -> Ledger:
    """The accounts of epochs."""

    def epoch_of(epoch: coordinator_pb2.EpochAccount) -> LedgerEpoch:
        return LedgerEpoch(
            **{name: getattr(epoch, name) for name in ("epoch", "samples", "once", "twice", "never", "skipped")},
            workers=dict(epoch.workers),
            slices={
                f"{one.index}-{one.index + one.slices - 1}" if one.slices > 1 else str(one.index): list(one.workers)
                for one in epoch.slices
            },
        )

    return Ledger(
        version=found.version,
        timeline=found.timeline,
        begun=found.begun,
        total=epoch_of(found.total),
        epochs=[epoch_of(epoch) for epoch in found.epochs],
    )
