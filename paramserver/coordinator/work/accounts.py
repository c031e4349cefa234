"""Per epoch: how often samples have counted, and which worker computed which slices, as all shards tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.tasks import Tasks
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.versions.ledger import Account, Accounts, ShardLedger
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import slices_from_proto

UNKNOWN = "no longer known"
# Stretches of slices in one answer. Of epochs that have more in all, the answer has the newest ones.
MOST_SLICES = 20_000


class _Job(ports.Commands, Protocol):
    registry: ModelRegistry
    poison: PoisonWatch
    schedule: Schedule
    tasks: Tasks


class Accounting:
    """Asks the shards of one job what they have counted.

    Who asks at about the same time gets the same answer. It is computed in a thread, so that the coordinator answers
    everybody else meanwhile.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._coming: asyncio.Task[tuple[Accounts, coordinator_pb2.AccountsResponse, dict[int, str]]] | None = None
        self._turn = asyncio.Lock()

    async def of(self, request: coordinator_pb2.AccountsRequest) -> coordinator_pb2.AccountsResponse:
        """What all shards have counted now. Raises UnavailableError while the job has no model or data set."""
        if self._coming is None or self._coming.done():
            self._coming = self._job.tasks.begin(self._next(), awaited=True)
        found, head, names = await asyncio.shield(self._coming)
        return await asyncio.to_thread(page, found, head, names, request)

    async def _next(self) -> tuple[Accounts, coordinator_pb2.AccountsResponse, dict[int, str]]:
        job = self._job
        async with self._turn:
            self._coming = None  # who asks from now on gets a later answer
            data, origin = job.schedule.data, job.schedule.origin
            if data is None or not data.slice_size or not job.registry.ready:
                raise errors.UnavailableError("nothing has been counted yet: the job has no data set or is not running")
            request = shard_pb2.LedgerRequest(job=job.options.job)
            replies = await job.shards.ask("Shard.Ledger", request, shard_pb2.LedgerResponse)
            head = coordinator_pb2.AccountsResponse(
                version=min((reply.version for reply in replies), default=0), timeline=job.timeline
            )
            names = {ident: name for reply in replies for ident, name in reply.names.items()}
            poisoned = list(job.poison.slices)

            def read() -> Accounts:
                return Accounts([_ledger(reply) for reply in replies], data, origin, poisoned)

            return await asyncio.to_thread(read), head, names


def _ledger(reply: shard_pb2.LedgerResponse) -> ShardLedger:
    rows = list(zip(reply.first, reply.lo, reply.hi, reply.of, reply.worker, strict=True))
    return ShardLedger(rows, reply.folded_steps, slices_from_proto(reply.counted))


def page(
    found: Accounts,
    head: coordinator_pb2.AccountsResponse,
    names: Mapping[int, str],
    request: coordinator_pb2.AccountsRequest,
) -> coordinator_pb2.AccountsResponse:
    """The epochs that ``request`` asks for, as a message with the facts of ``head``. ``names``: by member number."""
    shown = found.page(request.epoch if request.HasField("epoch") else None)
    if request.slices:
        shown = _short(shown, request.HasField("epoch"))
    response = coordinator_pb2.AccountsResponse(begun=found.begun, total=_to_proto(found.total, names, slices=False))
    response.MergeFrom(head)
    response.epochs.extend(_to_proto(one, names, request.slices) for one in shown)
    return response


def _short(shown: Sequence[Account], oldest: bool) -> list[Account]:
    """The ``oldest`` of these epochs, or the newest, as many as fit into one answer with all their slices."""
    kept: list[Account] = []
    stretches = 0
    for one in shown if oldest else reversed(shown):
        stretches += len(one.slices)
        if kept and stretches > MOST_SLICES:
            break
        kept.append(one)
    return kept if oldest else kept[::-1]


def _to_proto(one: Account, names: Mapping[int, str], slices: bool) -> coordinator_pb2.EpochAccount:
    """The account of an epoch as a message. ``names``: names of the workers, by member number."""

    def name(ident: int) -> str:
        return names.get(ident, f"worker {ident}") if ident else UNKNOWN

    message = coordinator_pb2.EpochAccount(
        epoch=one.epoch,
        samples=one.samples,
        once=one.once,
        twice=one.twice,
        never=one.never,
        skipped=one.skipped,
    )
    for ident, count in one.workers.items():
        message.workers[name(ident)] += count
    if slices:
        for lo, hi, who in one.slices:
            message.slices.add(index=lo, slices=hi - lo, workers=[name(ident) for ident in who])
    return message
