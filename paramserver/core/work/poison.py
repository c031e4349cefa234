"""Finds slices that kill each worker that computes them. Times in seconds.

In the steady state no worker says which slice it begins, so the first death says nothing. From then on workers are
*careful*: they tell where they are before they compute, until the job gets on. A slice at which others die then, one
after the other, is poison. Deaths of one worker, which is started again each time, say something about the worker, too:
while another worker could compute the slice, they are not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# After a death, reports of before it may still come in for so long.
_SETTLES_S = 2.0
# So many deaths are kept at most, the newest ones.
_DEATHS = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """A slice, and in synchronous mode the step that it belongs to."""

    epoch: int
    index: int
    step: int | None = None

    @property
    def slice(self) -> tuple[int, int]:
        """(epoch, index), which is the same in both modes."""
        return self.epoch, self.index


class Poison:
    """Counts deaths. ``most``: so many, the first one included, make a slice poison."""

    def __init__(self, most: int = 3) -> None:
        # Workers are to say where they are before they compute.
        self.careful = False
        self._most = most
        self._at: dict[int, Place] = {}
        self._told: dict[int, Place] = {}
        # The slice of each death, and the seat of the worker that died; None: a seat that nobody knows any more.
        self._deaths: list[tuple[Place, int | None]] = []
        self._total = 0
        self._last_at = 0.0
        self._counted = 0

    @property
    def deaths(self) -> tuple[Place, ...]:
        """The slices at which workers have died, once per death, as far as they have not counted since."""
        return tuple(place for place, _ in self._deaths)

    @property
    def in_a_row(self) -> int:
        """How many workers have died since the job last got on."""
        return self._total

    def restore(self, deaths: Iterable[Place], in_a_row: int, now: float) -> None:
        """Go on from the deaths that the previous coordinator has counted."""
        self._deaths, self._total = [(place, None) for place in deaths], in_a_row
        self.careful, self._last_at = in_a_row > 0, now

    def begins(self, worker: int, place: Place) -> None:
        """A careful worker is about to compute this slice."""
        self._at[worker] = place

    def tells(self, worker: int, place: Place | None) -> None:
        """The slice that a worker computes according to its report, which may be late."""
        if place is None:
            self._told.pop(worker, None)
        else:
            self._told[worker] = place

    def left(self, worker: int) -> None:
        """The worker has left in order."""
        self._at.pop(worker, None)
        self._told.pop(worker, None)

    def died(
        self, worker: int, done: Callable[[Place], bool], now: float, seat: int | None = None, alone: bool = True
    ) -> Place | None:
        """A worker has died: the slice that is poison, if that is plain now.

        ``done``: whether a slice has counted. ``seat``: the place of the worker, which the process that is started
        again in its stead takes; None: a place of its own. ``alone``: no worker of another seat lives.
        """
        place = self._at.get(worker)
        self.left(worker)
        self.careful, self._total, self._last_at = True, self._total + 1, now
        if place is None or done(place):
            return None
        self._deaths = [*self._deaths[1 - _DEATHS :], (place, seat)]
        seats = [one for at, one in self._deaths if at.slice == place.slice]
        several = alone or None in seats or len(set(seats)) > 1
        return place if several and self._enough(place) and not self._computed(place) else None

    def undecided(self, place: Place) -> bool:
        """True if the slice is most likely poison and a worker still computes it: other workers wait."""
        return self._enough(place) and self._computed(place)

    def _enough(self, place: Place) -> bool:
        alike = sum(one.slice == place.slice for one in self.deaths)
        return self._total >= self._most and alike >= self._most - 1

    def _computed(self, place: Place) -> bool:
        return any(one.slice == place.slice for one in (*self._at.values(), *self._told.values()))

    def skipped(self, place: Place) -> None:
        """No worker computes this slice any more."""
        self._deaths = [one for one in self._deaths if one[0].slice != place.slice]

    def look(self, counted: int, enough: int, done: Callable[[Place], bool], now: float) -> None:
        """``counted``: slices that have counted; after ``enough`` more of them without a death all is well."""
        self._deaths = [one for one in self._deaths if not done(one[0])]
        if self._deaths or now - self._last_at < _SETTLES_S:
            self._counted = counted
        elif counted - self._counted >= enough:
            self.careful, self._total = False, 0
