"""How far and how fast a job was at moments of its life: bounded, since old moments are thinned out evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MOMENTS = 600


class _Timed(Protocol):
    @property
    def at(self) -> float: ...


M = TypeVar("M", bound=_Timed)


@dataclass(frozen=True, slots=True)
class Moment:
    """The newest version, and samples per second of all workers, at a time in seconds since 1970."""

    at: float
    version: int
    samples_per_s: float


class Moments(Generic[M]):
    """At most ``most`` moments. When the room is full, every other moment goes, and half as many come from then on."""

    def __init__(self, most: int = MOMENTS) -> None:
        self._most = most
        # Of so many moments one is kept.
        self._every = 1
        self._taken = 0
        self._kept: list[M] = []
        self._newest: M | None = None

    def add(self, moment: M) -> None:
        """The job is at this moment. Moments that are not newer than the newest one are left out."""
        if self._newest is not None and moment.at <= self._newest.at:
            return
        self._newest = moment
        if self._taken % self._every == 0:
            self._kept.append(moment)
        self._taken += 1
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._every *= 2

    def after(self, at: float = 0.0) -> list[M]:
        """The moments that are kept after this time, and the newest one."""
        kept = self._kept
        if self._newest is not None and kept[-1] is not self._newest:
            kept = [*kept, self._newest]
        return [moment for moment in kept if moment.at > at]
