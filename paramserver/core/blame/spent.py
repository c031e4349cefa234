"""Where the time of a process went: by phase of a worker's step, and what a process lost without its doing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

# The phases of a worker. At any moment a worker is in one of them.
PHASES = ("data", "compute", "send", "wait", "receive", "other")
# Parts of the phases: garbage collection, the wait for a core, and time in which the process did not run at all.
LOSSES = ("gc", "starved", "paused")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by phase. The losses are parts of the phases, whichever these were."""

    data: float = 0.0
    compute: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    receive: float = 0.0
    other: float = 0.0
    gc: float = 0.0
    starved: float = 0.0
    paused: float = 0.0

    @property
    def all(self) -> float:
        """All phases together."""
        return self.busy + self.send + self.wait

    @property
    def busy(self) -> float:
        """The time in which the worker waited for no other process."""
        return self.data + self.compute + self.receive + self.other

    def times(self, factor: float) -> Spent:
        """So many times as much of each phase."""
        return Spent(*(factor * value for value in _values(self)))


_values = attrgetter(*PHASES, *LOSSES)


def total(parts: Iterable[Spent]) -> Spent:
    """The sum."""
    columns = list(zip(*(_values(part) for part in parts), strict=True))
    return Spent(*(sum(column) for column in columns))


def usual(parts: Iterable[Spent]) -> Spent:
    """The median of each phase by itself."""
    columns = list(zip(*(_values(part) for part in parts), strict=True))
    return Spent(*(median(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Lost:
    """From ``begin`` to ``end`` a process waited for a core for ``starved`` seconds, and stood still for ``paused``."""

    begin: float
    end: float
    starved: float
    paused: float


def lost_within(losses: Sequence[Lost], begin: float, end: float) -> tuple[float, float]:
    """(starved, paused) seconds between two moments. A loss that overlaps them counts by its share in them."""
    starved = paused = 0.0
    for lost in losses:
        both = min(end, lost.end) - max(begin, lost.begin)
        if both > 0:
            share = both / (lost.end - lost.begin)
            starved += share * lost.starved
            paused += share * lost.paused
    return starved, paused
