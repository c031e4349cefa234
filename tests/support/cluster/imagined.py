"""Imagined workers, what they may be doing, and a tally of what befell them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paramserver.core.versions.names import AsyncName

# What a worker does: asks for slices, waits for weights, computes, waits until its push has arrived everywhere, tells
# the shards that it has nothing to do, waits for slices; or it is gone.
SEEK, PULL, COMPUTE, PUSH, IDLE, REST, GONE = range(7)


@dataclass(slots=True)
class Tally:
    """What happened in a campaign, to show that it was not an idle one."""

    schedules: int = 0
    actions: int = 0
    joins: int = 0
    deaths: int = 0
    deaths_between_shards: int = 0
    evictions: int = 0
    idles: int = 0
    parked: int = 0  # pulls that were not answered at once
    fenced: int = 0  # pulls of those who were members no more
    repeated: int = 0  # messages that arrived twice
    lost_answers: int = 0  # calls that were repeated, since their answer did not come
    duplicates: int = 0
    duplicates_in_making: int = 0  # the same work again while the first was being applied

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Worker:
    """A worker, as far as it knows itself. ``clock`` is None while it does not know where it begins."""

    __slots__ = (
        "at_work",
        "clock",
        "done",
        "edition",
        "epoch",
        "ident",
        "last",
        "queue",
        "round",
        "seen",
        "state",
        "todo",
        "whole",
    )

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.state = SEEK
        self.clock: int | None = None
        self.at_work = False  # all shards have let it in under its present number
        self.queue: list[AsyncName] = []
        self.done: list[AsyncName] = []
        self.last: AsyncName | None = None
        self.todo = 0  # shards that have not answered yet, one bit each
        self.round = 0  # of pulls; answers to earlier ones come too late
        self.seen = 0  # the largest of the slowest clocks in this round
        self.whole = True  # all answers of this round were given to its present number
        self.epoch = 0
        self.edition = -1  # of the leases, when it last looked in vain
