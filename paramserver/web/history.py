"""The series of a job: version, samples per second and values of ctx.log over time, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paramserver.core.records.moments import MOMENTS, Moments
from paramserver.web.models import Series, Status

# More names of values are not kept.
MAX_NAMES = 32


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    version: int
    samples_per_s: float
    values: dict[str, float]


class History:
    """The state of the job at up to ``most`` moments."""

    def __init__(self, most: int = MOMENTS) -> None:
        self._moments: Moments[_Moment] = Moments(most)
        self._names: list[str] = []

    def take(self, status: Status, at_s: float) -> None:
        """The job is in this state at ``at_s`` seconds since 1970."""
        for name in status.metrics:
            if name not in self._names and len(self._names) < MAX_NAMES:
                self._names.append(name)
        values = {name: status.metrics[name] for name in self._names if name in status.metrics}
        self._moments.add(_Moment(at_s, status.version, status.samples_per_s, values))

    def series(self) -> Series:
        """All moments that are kept, and the newest one."""
        moments = self._moments.after(-math.inf)
        return Series(
            at_s=[one.at for one in moments],
            version=[one.version for one in moments],
            samples_per_s=[one.samples_per_s for one in moments],
            values={name: [_finite(one.values.get(name)) for one in moments] for name in self._names},
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
