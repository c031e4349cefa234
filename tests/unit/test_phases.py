"""Where the time of a worker goes, as it tells of it."""

from __future__ import annotations

import gc
import time

import pytest

from paramserver.core.blame.spent import PHASES
from paramserver.membership.pulse import Pulse
from paramserver.tracing import Recorder
from paramserver.v1 import coordinator_pb2
from paramserver.worker.job.garbage import Garbage
from paramserver.worker.job.phases import COMPUTE, DATA, MOST, OTHER, SEND, WAIT, Phases


class Worker:
    """A worker whose clock the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.pulse = Pulse()
        self.phases = Phases(self.pulse, Recorder())

    def spends(self, phase: int, seconds: float) -> None:
        self.phases.enter(phase)
        self.now += seconds

    def slice(self, step: int, compute: float = 0.3) -> None:
        self.spends(WAIT, 0.1)
        self.spends(DATA, 0.2)
        self.spends(COMPUTE, compute)
        self.phases.hands_in(step, asynchronous=False)
        self.phases.enter(SEND)

    def report(self, last: bool = True) -> coordinator_pb2.WorkerReport:
        report = coordinator_pb2.WorkerReport()
        self.phases.write(report, last)
        return report


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_a_slice_tells_where_the_time_since_the_last_one_went(worker: Worker) -> None:
    worker.slice(7)
    worker.spends(OTHER, 0.5)
    worker.slice(8)
    first, second = worker.report().steps
    assert (first.step, first.first, second.step, second.first) == (7, True, 8, False)
    spent = second.phases
    assert (spent.wait_s, spent.data_s, spent.compute_s, spent.other_s) == pytest.approx((0.1, 0.2, 0.3, 0.5))
    assert not worker.report().steps, "each slice is told once"


def test_totals_and_the_present_phase(worker: Worker) -> None:
    worker.slice(7)
    worker.spends(DATA, 3.0)
    report = worker.report()
    assert report.phase == "data"
    assert report.phase_s == pytest.approx(3.0)
    assert report.phases.data_s == pytest.approx(3.2)
    assert report.phases.compute_s == pytest.approx(0.3)


def test_a_slice_is_told_when_the_losses_in_it_are_known(worker: Worker) -> None:
    worker.slice(7)
    report = worker.report(last=False)
    assert (list(report.steps), report.untold) == ([], True)
    worker.pulse.beat_at = worker.now
    report = worker.report(last=False)
    assert ([step.step for step in report.steps], report.untold) == ([7], False)


def test_of_many_slices_the_longest_are_told_in_order(worker: Worker) -> None:
    for step in range(3 * MOST):
        worker.slice(step, compute=0.3 + (step % 3 == 0))
    assert [step.step for step in worker.report().steps] == list(range(0, 3 * MOST, 3))


def test_the_first_slice_on_another_timeline_is_one_of_a_newcomer(worker: Worker) -> None:
    worker.slice(7)
    worker.phases.begins_anew()
    worker.slice(3)
    assert [step.first for step in worker.report().steps] == [True, True]


def test_entering_a_phase_returns_the_one_that_ends(worker: Worker) -> None:
    worker.phases.enter(DATA)
    assert PHASES[worker.phases.enter(COMPUTE)] == "data"


def test_collections_of_garbage_are_counted_once_each() -> None:
    garbage = Garbage()
    garbage.begin()
    garbage.begin()
    try:
        before = garbage.seconds
        gc.collect()
        assert garbage.seconds > before
        assert sum(getattr(call, "__self__", None) is garbage for call in gc.callbacks) == 1
    finally:
        gc.callbacks[:] = [call for call in gc.callbacks if getattr(call, "__self__", None) is not garbage]
