"""Which checkpoints are the best by a value that scripts log.

Checkpoints are known by timeline and version. A value belongs to the checkpoint of its version. If the job goes back,
values of later versions belong to a history that does not exist any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

# Timeline and version.
Place = tuple[int, int]

# So many values of versions that are not checkpoints yet are remembered. So many checkpoints stay for a value that may
# still come, and all for so many seconds, since workers report what was logged about once a second.
_VALUES, _AWAITED, _AWAITED_S = 1000, 3, 30.0


class Best:
    """The ranking of one job. ``lowest``: a lower value is better. ``keep``: so many checkpoints stay."""

    def __init__(self, lowest: bool, keep: int) -> None:
        self._lowest, self._keep = lowest, keep
        self._values: dict[Place, float] = {}
        self._saved: set[Place] = set()
        # Checkpoints that were made for their value, oldest first, and since when it is awaited.
        self._awaited: dict[Place, float] = {}
        # No value of a later version counts that is brought by `restore`.
        self._bound = math.inf

    def restore(self, values: Mapping[Place, float]) -> None:
        """An earlier coordinator has saved these checkpoints, and has heard these values of them."""
        for place, value in values.items():
            if place[1] <= self._bound:
                self._saved.add(place)
                self._values.setdefault(place, value)

    def hear(self, place: Place, value: float) -> bool:
        """A value was logged at this version; whether the ranking may have changed.

        NaN and infinite values are never among the best.
        """
        if not math.isfinite(value):
            return False
        self._values[place] = value
        others = [other for other in self._values if other not in self._saved and other not in self._awaited]
        for other in others[:-_VALUES]:
            del self._values[other]
        return place in self._saved

    def awaits(self, place: Place, now: float) -> None:
        """This version is saved for a value that may still come. ``now``: seconds of one clock."""
        self._awaited.setdefault(place, now)

    def saved(self, place: Place) -> bool:
        """This version is a checkpoint now; whether the ranking has changed."""
        self._saved.add(place)
        return place in self._values

    def undone(self, version: int) -> None:
        """The job goes back to this version: forget what came later."""
        self._bound = min(self._bound, version)
        self._values = {place: value for place, value in self._values.items() if place[1] <= version}
        self._saved = {place for place in self._saved if place[1] <= version}
        self._awaited = {place: since for place, since in self._awaited.items() if place[1] <= version}

    def removed(self, places: Iterable[Place]) -> None:
        """These checkpoints are gone."""
        gone = set(places)
        self._saved -= gone
        self._awaited = {place: since for place, since in self._awaited.items() if place not in gone}
        self._values = {place: value for place, value in self._values.items() if place not in gone}

    def ranking(self) -> list[tuple[Place, float]]:
        """The best checkpoints with their values, the best one first. Of equal values the earlier one is better."""
        known = [(place, value) for place, value in self._values.items() if place in self._saved]
        sign = 1 if self._lowest else -1
        return sorted(known, key=lambda one: (sign * one[1], one[0]))[: self._keep]

    def kept(self, now: float) -> set[Place]:
        """The checkpoints that are not to be removed: the best ones, and the last ones whose value may still come."""
        waiting = [place for place in self._awaited if place not in self._values]
        fresh = {place for place in waiting if now - self._awaited[place] < _AWAITED_S}
        return {place for place, _ in self.ranking()} | fresh | set(waiting[-_AWAITED:])
