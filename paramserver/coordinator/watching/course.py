"""The history of a job as the coordinator tells it: curves of logged values, and moments."""

from __future__ import annotations

import time
from typing import Protocol

from paramserver.coordinator.reports import Reports
from paramserver.coordinator.watching.records import Records
from paramserver.core.records.history import Point
from paramserver.core.records.moments import Moment, Moments
from paramserver.v1 import coordinator_pb2

# Between two moments.
EVERY_S = 0.5
# In one answer: curves, points of a curve, and points of all curves.
MAX_CURVES = 64
MAX_POINTS, ALL_POINTS = 1000, 10_000


class _Job(Protocol):
    reports: Reports
    records: Records


class Course:
    """Notes twice a second how far and how fast the job is. Begins with the process of the coordinator."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._moments: Moments[Moment] = Moments()
        self._due = 0.0

    def look(self) -> None:
        """Note the present moment if it is time; called several times a second."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + EVERY_S
            reports = self._job.reports
            self._moments.add(Moment(time.time(), reports.newest_version(), reports.samples_per_s()))

    def tell(self, since_s: float) -> coordinator_pb2.History:
        """Curves and moments after ``since_s`` (seconds since 1970)."""
        told = coordinator_pb2.History()
        history = self._job.records.history
        curves = {
            name: points
            for name in history.names()[:MAX_CURVES]
            if (points := [point for point in history.points(name) if point.at > since_s])
        }
        most = min(MAX_POINTS, ALL_POINTS // max(1, len(curves)))
        for name, points in curves.items():
            curve = told.curves.add(name=name)
            for point in _thinned(points, most):
                curve.points.add(step=point.step, at_s=point.at, timeline=point.timeline, value=point.value)
        for moment in self._moments.after(since_s):
            told.moments.add(at_s=moment.at, version=moment.version, samples_per_s=moment.samples_per_s)
        return told


def _thinned(points: list[Point], most: int) -> list[Point]:
    """At most ``most`` of them, the last one among them."""
    stride = -(-len(points) // most)
    return points[(len(points) - 1) % stride :: stride]
