"""Facts that all simulated shards of a job have in common, and the reports of a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paramserver.core.versions.consistency import Consistency
from paramserver.simulate.costs import Costs
from paramserver.simulate.machinery.blame import Chain
from paramserver.simulate.machinery.clock import VirtualClock
from paramserver.simulate.parts.hosts import Network


@dataclass(frozen=True, slots=True)
class Published:
    """A shard has published a version. ``chain``: of time; ``worker``: whose contribution came last.

    ``behind``: asynchronous mode: updates of other workers between the contribution's weights and its own update.
    """

    shard: int
    version: int
    chain: Chain
    worker: int = 0
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """Facts that all shards of a job have in common. ``apply_ns``, ``further``: of the optimizer.

    ``further``: bytes of its state for each byte of weights.
    """

    clock: VirtualClock
    network: Network
    costs: Costs
    consistency: Consistency
    workers: Sequence[int]
    apply_ns: float
    on_published: Callable[[Published], None]
    further: float = 0.0
