"""Facts about a shard beside its tensors, as its primary tells them to a new backup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paramserver.checkpoint.contents import ShardFacts
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency
from paramserver.server.versions.shard import ShardTensors
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import (
    consistency_from_proto,
    consistency_to_proto,
    pack_mask,
    slices_from_proto,
    slices_to_proto,
    unpack_mask,
)


@dataclass(frozen=True, slots=True)
class Beside:
    """All that a backup begins with, beside the tensors. ``mark``: see `Marks`."""

    facts: ShardFacts
    applied_before: int
    duplicate: int
    consistency: Consistency
    clocks: dict[int, int]
    floor: int
    mark: bytes


def ledger_of(state: ShardState, names: Mapping[int, str]) -> shard_pb2.LedgerResponse:
    """The contributions that were counted, and the workers that brought them. ``names``: by member number."""
    rows = state.ledger.rows()
    return shard_pb2.LedgerResponse(
        first=[row[0] for row in rows],
        lo=[row[1] for row in rows],
        hi=[row[2] for row in rows],
        of=[row[3] for row in rows],
        worker=[row[4] for row in rows],
        folded_steps=state.ledger.folded_steps,
        counted=slices_to_proto(state.counted()),
        names={ident: name for ident, name in names.items() if ident},
        version=state.version,
        timeline=state.timeline,
    )


def clocks_to_proto(clocks: Mapping[int, int]) -> list[shard_pb2.WorkerClock]:
    """The clocks of workers, by member number."""
    return [shard_pb2.WorkerClock(worker=worker, clock=clock) for worker, clock in sorted(clocks.items())]


def facts_to_proto(state: ShardState, tensors: ShardTensors, names: Mapping[int, str]) -> shard_pb2.ShardFacts:
    """The facts of a shard that makes no version just now."""
    return shard_pb2.ShardFacts(
        applied=state.counters.applied,
        applied_before=state.counters.applied_before,
        duplicate=state.counters.duplicate,
        skipped=tensors.skipped,
        samples=tensors.samples,
        advances=tensors.advances,
        ever_used=pack_mask(tensors.ever_used, len(tensors.layout.tensors)),
        ledger=ledger_of(state, names),
        consistency=consistency_to_proto(state.consistency),
        counted=state.marks.of(state.version),
        clocks=clocks_to_proto(state.pulls.clocks),
        min_clock=state.pulls.floor,
    )


def facts_from_proto(message: shard_pb2.ShardFacts, tensors: int) -> Beside:
    """The same, at the backup. ``tensors``: the number of tensors of the model. Raises ProtocolError."""
    ledger = message.ledger
    facts = ShardFacts(
        applied=message.applied,
        skipped=message.skipped,
        samples=message.samples,
        advances=message.advances,
        ever_used=unpack_mask(message.ever_used, tensors),
        counted=slices_from_proto(ledger.counted),
        rows=list(zip(ledger.first, ledger.lo, ledger.hi, ledger.of, ledger.worker, strict=True)),
        folded_steps=ledger.folded_steps,
        names=dict(ledger.names),
    )
    return Beside(
        facts,
        message.applied_before,
        message.duplicate,
        consistency_from_proto(message.consistency),
        {clock.worker: clock.clock for clock in message.clocks},
        message.min_clock,
        message.counted,
    )
