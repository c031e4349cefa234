"""How a script advances a scheduler in each step: before or after ``optimizer.step()``, and with which value.

A script counts the batches of its own worker. What it gives to ``scheduler.step(value)`` is recognised as one of a few
forms, so that all workers can compute the value from the job's place in the data: torch's value, for one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# epoch + batch / batches, the same with batch + 1, epoch * batches + batch, and that + 1: floats, and whole numbers.
_FORMS = {float: (1, 2), int: (3, 4)}
# No larger number stands for a way.
MOST_WAYS = 2 * 4 + 1


@dataclass(frozen=True, slots=True)
class Place:
    """A batch, by its epoch and its number there, both from 0."""

    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class Way:
    """``before``: the script calls ``scheduler.step`` before ``optimizer.step``. ``form``: of the value; 0: no value.

    >>> Way(before=True, form=1).number, Way.of(3) == Way(before=True, form=1)
    (3, True)
    """

    before: bool = False
    form: int = 0

    @property
    def number(self) -> int:
        """The way as a number; 0: the plainest one."""
        return 2 * self.form + self.before

    @classmethod
    def of(cls, number: int) -> Way:
        """The way of this number."""
        return cls(bool(number % 2), number // 2)

    def value(self, place: Place, batches: int) -> float:
        """What plain torch gives at this place; an epoch has so many ``batches`` (0: there are no epochs)."""
        shift = place.batch + (self.form + 1) % 2
        return place.epoch + shift / batches if self.form < 3 else place.epoch * batches + shift


def forms(given: float, places: Sequence[Place], batches: int) -> list[int]:
    """The forms that give this value at one of the places, those at the first places first."""
    chosen = _FORMS[int if isinstance(given, int) else float]
    if chosen == _FORMS[float] and not batches:
        return []
    found = [
        form
        for place in places
        for form in chosen
        if math.isclose(given, Way(form=form).value(place, batches), abs_tol=1e-9)
    ]
    return list(dict.fromkeys(found))
