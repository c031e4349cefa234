"""How far and how fast a job was at moments of its life: bounded, since old moments are thinned out evenly."""

from __future__ import annotations

from dataclasses import dataclass

MOMENTS = 600
EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """The newest version, and samples per second of all workers, at a time in seconds since 1970."""

    at: float
    version: int
    samples_per_s: float


class Moments:
    """At most ``most`` moments. When the room is full, every other moment goes."""

    def __init__(self, most: int = MOMENTS) -> None:
        self._most = most
        self._every_s = EVERY_S
        self._kept: list[Moment] = []
        self._newest: Moment | None = None

    def add(self, moment: Moment) -> None:
        """The job is at this moment. Moments that are not newer than the newest one are left out."""
        if self._newest is not None and moment.at <= self._newest.at:
            return
        self._newest = moment
        if not self._kept or moment.at - self._kept[-1].at >= self._every_s:
            self._kept.append(moment)
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._every_s *= 2

    def after(self, at: float = 0.0) -> list[Moment]:
        """The moments that are kept after this time, and the newest one."""
        kept = self._kept
        if self._newest is not None and kept[-1] is not self._newest:
            kept = [*kept, self._newest]
        return [moment for moment in kept if moment.at > at]
