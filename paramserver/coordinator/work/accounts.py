"""Per epoch: how often samples have counted, and which worker computed which slices, as all shards tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.versions.ledger import Account, ShardLedger, accounts
from paramserver.core.work.slices import DataSpec, Step, SyncSchedule, schedule_of, slice_samples
from paramserver.v1 import coordinator_pb2, shard_pb2

UNKNOWN = "no longer known"


class _Job(ports.Commands, Protocol):
    registry: ModelRegistry
    poison: PoisonWatch
    schedule: Schedule


async def account(job: _Job, slices: bool) -> coordinator_pb2.AccountsResponse:
    """Ask all shards now. Raises UnavailableError while the job has no model or data set."""
    data = job.schedule.data
    if data is None or not data.slice_size or not job.registry.ready:
        raise errors.UnavailableError("nothing has been counted yet: the job has no data set or is not running")
    request = shard_pb2.LedgerRequest(job=job.options.job)
    replies = await job.shards.ask("Shard.Ledger", request, shard_pb2.LedgerResponse)
    names = {ident: name for reply in replies for ident, name in reply.names.items()}
    step_of = steps(job.schedule.origin, data, job.options.step_slices)
    made = accounts([_ledger(reply) for reply in replies], data, step_of)
    response = coordinator_pb2.AccountsResponse(
        version=min((reply.version for reply in replies), default=0), timeline=job.timeline
    )
    response.epochs.extend(to_proto(one, names, slices) for one in made)
    without_samples(response, job.poison.slices, data)
    return response


def without_samples(
    found: coordinator_pb2.AccountsResponse, poisoned: Iterable[tuple[int, int]], data: DataSpec
) -> None:
    """Move the samples of slices that counted without them from ``once`` to ``skipped``."""
    epochs = {epoch.epoch: epoch for epoch in found.epochs}
    for number, index in poisoned:
        epoch, samples = epochs.get(number), slice_samples(data, index)
        if epoch is not None and epoch.once >= samples:
            epoch.once -= samples
            epoch.skipped += samples


def steps(origin: SyncSchedule, data: DataSpec, slices_per_step: int) -> Callable[[int], Step | None]:
    """A function from the number of a synchronous step to its slices, also for steps before the present schedule."""
    first = schedule_of(data, slices_per_step)
    return lambda number: origin.step(number) if number >= origin.base_version else first.step(number)


def _ledger(reply: shard_pb2.LedgerResponse) -> ShardLedger:
    rows = list(zip(reply.first, reply.lo, reply.hi, reply.of, reply.worker, strict=True))
    counted = {e.epoch: [(part.start, part.stop) for part in e.slices] for e in reply.counted}
    return ShardLedger(rows, reply.folded_steps, counted)


def to_proto(one: Account, names: Mapping[int, str], slices: bool) -> coordinator_pb2.EpochAccount:
    """The account of an epoch as a message. ``names``: names of the workers, by member number."""

    def name(ident: int) -> str:
        return names.get(ident, f"worker {ident}") if ident else UNKNOWN

    message = coordinator_pb2.EpochAccount(
        epoch=one.epoch, samples=one.samples, once=one.once, twice=one.twice, never=one.never
    )
    for ident, count in one.workers.items():
        message.workers[name(ident)] += count
    if slices:
        for index, who in sorted(one.slices.items()):
            message.slices.append(coordinator_pb2.SliceAccount(index=index, workers=[name(ident) for ident in who]))
    return message
