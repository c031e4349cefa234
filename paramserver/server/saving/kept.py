"""The state that a shard keeps on a new timeline when scripts load weights or optimizer state (``ctx.load``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paramserver.core.versions.ledger import Row
from paramserver.core.versions.shard import ShardState
from paramserver.server.arithmetic.apply import ChunkState
from paramserver.server.versions.shard import ShardTensors
from paramserver.server.versions.version import Version
from paramserver.v1 import shard_pb2


@dataclass(frozen=True, slots=True)
class Kept:
    """A version with its optimizer state, all copied, and all that had been counted up to it."""

    version: int
    weights: Mapping[int, torch.Tensor]
    states: Mapping[int, ChunkState]
    counted: Mapping[int, tuple[tuple[int, int], ...]]
    applied: int
    rows: list[Row]
    folded_steps: int
    names: Mapping[int, str]
    skipped: int
    samples: int
    schedule: shard_pb2.Schedule

    @classmethod
    def of(cls, newest: Version, state: ShardState, tensors: ShardTensors, names: Mapping[int, str]) -> Kept:
        """The newest version of a shard that is at rest. ``names``: of workers, by member number."""
        return cls(
            version=state.version,
            weights={index: values.clone() for index, values in newest.tensors.items()},
            states={index: one.fork() for index, one in tensors.states.items()},
            counted={epoch: tuple(ranges) for epoch, ranges in state.counted().items()},
            applied=state.counters.applied,
            rows=state.ledger.rows(),
            folded_steps=state.ledger.folded_steps,
            names=dict(names),
            skipped=tensors.skipped,
            samples=tensors.samples,
            schedule=tensors.schedule,
        )
