"""The pieces of a model: the chunks of a real plan, or groups of chunks if there are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.core.layout.plan import Plan


@dataclass(frozen=True, slots=True)
class Piece:
    """Some chunks of one shard. ``ready``: after which part of a backward pass, 0 to 1, their gradients are there.

    ``frames``: in how many messages they travel.
    """

    nbytes: int
    ready: float
    frames: int = 1


def pieces_of(plan: Plan, most: int) -> list[list[Piece]]:
    """The pieces of each shard, in the order of the layout. About ``most`` in all, at least one for each used shard."""
    chunks = plan.layout.chunks
    together = -(-len(chunks) // max(1, most))
    found = []
    for shard in range(plan.shards):
        own = plan.chunks_of(shard)
        rows = [own[at : at + together] for at in range(0, len(own), together)]
        found.append([_piece([chunk.nbytes for chunk in row], row[0].index, len(chunks)) for row in rows])
    return found


def _piece(sizes: Sequence[int], first: int, of: int) -> Piece:
    # A backward pass begins with the last layers.
    return Piece(sum(sizes), (of - first) / of, len(sizes))
