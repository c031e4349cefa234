"""Facts about a contribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paramserver.core.versions.advances import Advances
from paramserver.core.versions.names import Name
from paramserver.v1 import shard_pb2, types_pb2

if TYPE_CHECKING:
    from paramserver.worker.gradients.outgoing import Encoded

# Of one push to all shards: the outcomes that there were.
Outcomes = frozenset[shard_pb2.Outcome]


@dataclass(frozen=True, slots=True)
class PushFacts:
    """All of a contribution except its bytes. ``base_versions``: by server, the version it was computed on.

    ``slot``: its place in this worker's inbox, if it lies there. ``encoded``: the compressed chunks by their index.
    ``by_data``: contributions of the same name are equal.
    """

    name: Name
    samples: int
    overflow: bool
    used: frozenset[int]
    groups: Sequence[types_pb2.GroupHypers]
    base_versions: Sequence[int]
    clock: int = 0
    advances: str = Advances().encode()
    clip_norm: float = 0.0
    nonce: int = 0
    slot: int | None = None
    encoded: Mapping[int, Encoded] = field(default_factory=dict)
    by_data: bool = True
