"""The curves of logged values in memory: bounded, since a curve that gets too long is thinned."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from paramserver.core.records.steps import StepValues

POINTS = 2000
NAMES = 500


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a closed step. ``at``: when the step was closed, in seconds since 1970."""

    step: int
    at: float
    timeline: int
    value: float


@dataclass(slots=True)
class _Curve:
    # Of each so many steps the last value is kept.
    stride: int = 1
    points: list[Point] = field(default_factory=list)


class History:
    """The curve of each name: at most ``POINTS`` points, of at most ``NAMES`` names.

    Where the job goes back to an earlier step, the points from this step on are removed when the step is closed again.
    """

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}
        # Rises with each change.
        self.edition = 0
        # The newest timeline of a point.
        self._timeline = 0

    def add(self, step: StepValues, at: float) -> None:
        """A step was closed at the time ``at`` (seconds since 1970)."""
        self.edition += 1
        if step.timeline > self._timeline:
            self._timeline = step.timeline
            self.void(step.step)
        for name, value in step.values.items():
            if name in self._curves or len(self._curves) < NAMES:
                _insert(self._curves.setdefault(name, _Curve()), Point(step.step, at, step.timeline, value))

    def void(self, step: int) -> None:
        """The points from this step on do not count any more."""
        for curve in self._curves.values():
            del curve.points[bisect_left(curve.points, step, key=_step) :]

    def join(self, later: History) -> None:
        """Take in the points of a history that goes on from this one."""
        for name in later.names():
            for point in later.points(name):
                self.add(StepValues(point.step, point.timeline, {name: point.value}), point.at)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._curves)

    def points(self, name: str, after: int = -1) -> list[Point]:
        """The points of a name with steps above ``after``, in the order of steps; none of an unknown name."""
        points = self._curves[name].points if name in self._curves else []
        return points[bisect_left(points, after + 1, key=_step) :]

    def last(self) -> dict[str, float]:
        """The newest value of each name."""
        return {name: curve.points[-1].value for name, curve in sorted(self._curves.items()) if curve.points}


def _insert(curve: _Curve, point: Point) -> None:
    points = curve.points
    place = bisect_left(points, point.step, key=_step)
    if place < len(points) and points[place].step == point.step:
        points[place] = point
    else:
        points.insert(place, point)
    # The newest point stays until the next one of the same group of steps comes.
    if place > 0 and points[place - 1].step // curve.stride == point.step // curve.stride:
        del points[place - 1]
    if len(points) > POINTS:
        curve.stride *= 2
        groups = {kept.step // curve.stride: kept for kept in points}
        curve.points = list(groups.values())


def _step(point: Point) -> int:
    return point.step
