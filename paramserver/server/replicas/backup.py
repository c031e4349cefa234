"""One backup of a shard, or one shard of a new plan, as the primary sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paramserver.core.layout.plan import Chunk
from paramserver.server.replicas.outbox import Loan
from paramserver.server.replicas.parcels import DraftParcel, Parcel
from paramserver.transport.base import Channel

# The address of the shard at a backup, and the number of the placement with which it became one. Of a shard of a new
# plan: its address, and the number of the plan.
Place = tuple[str, int]


@dataclass(slots=True, eq=False)
class Backup:
    """One backup. ``has``: the chunks that it has when it has taken in what ``queue`` holds.

    ``feed``: not 0 for a shard of a new plan, which is to have the chunks ``wants``; see `parts`.
    """

    place: Place
    channel: Channel
    wants: Sequence[Chunk]
    mbps: float
    feed: int = 0
    # Set when it can read the outbox.
    loan: Loan | None = None
    # The newest draft of which it was sent chunks.
    ahead: DraftParcel | None = None
    # Done when it does not read the outbox any more.
    reading: asyncio.Future[None] | None = None
    begun: bool = False
    has: set[int] = field(default_factory=set)
    whole: bool = False
    queue: asyncio.Queue[tuple[Parcel, asyncio.Future[None]]] = field(default_factory=asyncio.Queue)
    waiting: set[asyncio.Future[None]] = field(default_factory=set)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the shard at the backup."""
        return self.place[0]
