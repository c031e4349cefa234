"""The state that a shard keeps on a new timeline when scripts load weights or optimizer state (``ctx.load``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paramserver.checkpoint.contents import ShardFacts
from paramserver.core.shards.shard import ShardState
from paramserver.server.arithmetic.state import State
from paramserver.server.versions.shard import ShardTensors
from paramserver.server.versions.version import Version


@dataclass(frozen=True, slots=True)
class Kept:
    """A version with its optimizer state, all copied, and the facts of a shard up to this version."""

    version: int
    weights: Mapping[int, torch.Tensor]
    states: Mapping[int, State]
    facts: ShardFacts

    @classmethod
    def of(cls, newest: Version, state: ShardState, tensors: ShardTensors, names: Mapping[int, str]) -> Kept:
        """The newest version of a shard that is at rest. ``names``: of workers, by member number."""
        weights = {index: values.clone() for index, values in newest.tensors.items()}
        states = {index: one.fork() for index, one in tensors.states.items()}
        return cls(state.version, weights, states, facts_of(state, tensors, names))


def facts_of(state: ShardState, tensors: ShardTensors, names: Mapping[int, str]) -> ShardFacts:
    """The state of a shard beside its tensors. ``names``: of workers, by member number."""
    return ShardFacts(
        applied=state.counters.applied,
        skipped=tensors.skipped,
        samples=tensors.samples,
        advances=tensors.advances,
        ever_used=tensors.ever_used,
        counted=state.counted(),
        rows=state.ledger.rows(),
        folded_steps=state.ledger.folded_steps,
        names=dict(names),
    )
