"""The series of a job: version, samples per second and values of ctx.log over time, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paramserver.web.models import Series, Status

MAX_MOMENTS = 600
# More names of values are not kept.
MAX_NAMES = 32


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    version: int
    samples_per_s: float
    values: dict[str, float]


class History:
    """Moments of a job. When the room is full, every other moment goes, and half as many are kept from then on."""

    def __init__(self, most: int = MAX_MOMENTS) -> None:
        self._most = most
        self._kept: list[_Moment] = []
        # Of so many moments one is kept.
        self._every = 1
        self._taken = 0
        self._newest: _Moment | None = None
        self._names: list[str] = []

    def take(self, status: Status, at_s: float) -> None:
        """The job is in this state at ``at_s`` seconds since 1970."""
        for name in status.metrics:
            if name not in self._names and len(self._names) < MAX_NAMES:
                self._names.append(name)
        self._newest = _Moment(at_s, status.version, status.samples_per_s, status.metrics)
        if self._taken % self._every == 0:
            self._kept.append(self._newest)
        self._taken += 1
        if len(self._kept) >= self._most:
            self._kept = self._kept[::2]
            self._every *= 2

    def series(self) -> Series:
        """All moments that are kept, and the newest one."""
        moments = list(self._kept)
        if self._newest is not None and moments[-1] is not self._newest:
            moments.append(self._newest)
        return Series(
            at_s=[one.at_s for one in moments],
            version=[one.version for one in moments],
            samples_per_s=[one.samples_per_s for one in moments],
            values={name: [_finite(one.values.get(name)) for one in moments] for name in self._names},
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
