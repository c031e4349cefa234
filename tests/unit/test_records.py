"""The values of ctx.log: one per name and step, whoever computes the slices; curves that are bounded."""

from __future__ import annotations

from math import isnan, nan

import pytest

from paramserver.core.records.history import POINTS, History
from paramserver.core.records.steps import Collector, Logged, StepValues


def of(step: int, index: int, loss: float, samples: int = 8, timeline: int = 1) -> Logged:
    return Logged(step, timeline, {"loss": loss}, (0, index), samples)


def closed(steps: list[StepValues]) -> list[tuple[int, dict[str, float]]]:
    return [(step.step, dict(step.values)) for step in steps]


class Workers:
    """Workers that report to a collector; each has its own numbers."""

    def __init__(self, asynchronous: bool = False) -> None:
        self.collector = Collector(patience_s=5.0)
        self.asynchronous = asynchronous
        self.numbers: dict[int, int] = {}

    def report(self, worker: int, *calls: Logged, now: float = 0.0) -> None:
        first = self.numbers.get(worker, 0)
        self.numbers[worker] = first + len(calls)
        self.collector.hear(worker, f"worker-{worker}", first, calls, now, self.asynchronous)


def test_the_value_of_a_step_is_the_mean_of_its_slices_by_samples() -> None:
    workers = Workers()
    workers.report(0, of(0, 0, 1.0, samples=30))
    workers.report(1, of(0, 1, 2.0, samples=10))
    assert closed(workers.collector.close([(1, 1), (1, 1)], 0.0)) == [(0, {"loss": 1.25})]


def test_the_value_does_not_depend_on_how_many_workers_computed_the_slices() -> None:
    values = [0.1, 0.7, 0.3, 1e-9]
    found = set()
    for count in (1, 2, 4):
        workers = Workers()
        for index in (2, 0, 3, 1):
            workers.report(index % count, of(0, index, values[index], samples=7 + index))
        found.add(workers.collector.close([], 0.0)[0].values["loss"])
    assert len(found) == 1


def test_the_last_value_of_a_slice_counts_whoever_computed_it() -> None:
    workers = Workers()
    workers.report(0, of(0, 0, 1.0), of(0, 0, 3.0))
    workers.report(1, of(0, 0, 3.0))
    assert closed(workers.collector.close([], 0.0)) == [(0, {"loss": 3.0})]


def test_values_outside_of_slices_count_once_for_each_worker() -> None:
    workers = Workers()
    workers.report(0, Logged(4, 1, {"accuracy": 0.5}), Logged(4, 1, {"accuracy": 0.6}))
    workers.report(1, Logged(4, 1, {"accuracy": 0.8}))
    assert workers.collector.close([], 0.0)[0].values["accuracy"] == pytest.approx(0.7)


def test_a_nan_of_one_slice_is_the_value_of_the_step() -> None:
    workers = Workers()
    workers.report(0, of(0, 0, nan), of(0, 1, 1.0))
    assert isnan(workers.collector.close([], 0.0)[0].values["loss"])


def test_a_step_is_closed_when_no_worker_can_add_to_it() -> None:
    workers = Workers()
    workers.report(0, of(0, 0, 1.0), of(1, 0, 2.0))
    assert closed(workers.collector.close([(1, 1), (1, 0)], 0.0)) == []
    assert closed(workers.collector.close([(1, 1), (1, 1)], 0.0)) == [(0, {"loss": 1.0})]
    assert closed(workers.collector.close([(1, 1), (1, 1)], 4.9)) == []
    assert closed(workers.collector.close([(1, 1), (1, 1)], 5.0)) == [(1, {"loss": 2.0})], "its patience is over"


def test_calls_that_are_sent_again_count_once() -> None:
    workers = Workers(asynchronous=True)
    calls = [of(0, 0, 1.0), of(1, 1, 2.0)]
    workers.collector.hear(7, "worker-0", 0, calls, 0.0, True)
    assert len(workers.collector.close([], 0.0)) == 2
    workers.collector.hear(7, "worker-0", 0, [*calls, of(2, 2, 3.0)], 0.0, True)
    assert closed(workers.collector.close([], 0.0)) == [(2, {"loss": 3.0})]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_late_value_of_a_slice_is_a_second_computation_or_asynchronous_another_update(asynchronous: bool) -> None:
    workers = Workers(asynchronous)
    workers.report(0, of(3, 0, 1.0))
    assert len(workers.collector.close([], 0.0)) == 1
    workers.report(1, of(3, 1, 2.0))
    assert closed(workers.collector.close([], 0.0)) == ([(4, {"loss": 2.0})] if asynchronous else [])


def test_another_name_may_come_late() -> None:
    workers = Workers()
    workers.report(0, of(3, 0, 1.0))
    workers.collector.close([], 0.0)
    workers.report(0, Logged(3, 1, {"accuracy": 0.9}))
    assert closed(workers.collector.close([], 0.0)) == [(3, {"accuracy": 0.9})]


def test_when_the_job_goes_back_steps_are_closed_again_and_older_values_of_them_are_void() -> None:
    workers = Workers()
    workers.report(0, of(5, 0, 1.0), of(6, 0, 1.0))
    workers.report(1, of(5, 0, 2.0, timeline=2))
    assert closed(workers.collector.close([], 0.0)) == [(5, {"loss": 2.0})]
    workers.report(0, of(7, 0, 1.0))
    assert workers.collector.close([], 0.0) == [], "of the timeline that was left"
    workers.report(0, of(4, 0, 4.0))
    assert closed(workers.collector.close([], 0.0)) == [(4, {"loss": 4.0})], "of a step that is not done again"


def test_a_worker_that_has_not_followed_yet_holds_the_new_timeline_back() -> None:
    workers = Workers()
    workers.report(0, of(5, 0, 1.0, timeline=2))
    assert workers.collector.close([(2, 6), (1, 9)], 0.0) == []
    assert len(workers.collector.close([(2, 6), (2, 6)], 0.0)) == 1


def test_a_coordinator_that_takes_over_closes_no_step_twice() -> None:
    for asynchronous in (False, True):
        workers = Workers(asynchronous)
        workers.collector.go_on([StepValues(n, 1, {"loss": 1.0}) for n in range(10)])
        workers.report(0, *(of(n, n, 1.0) for n in range(5, 12)))
        assert [step.step for step in workers.collector.close([], 0.0)] == [10, 11]


# ---- curves


def curve(history: History, name: str = "loss") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in history.points(name)]


def test_a_curve_is_bounded_and_keeps_its_ends() -> None:
    history = History()
    for step in range(100_000):
        history.add(StepValues(step, 1, {"loss": float(step)}), at=float(step))
    points = history.points("loss")
    assert POINTS / 2 <= len(points) <= POINTS
    assert points[-1].step == 99_999
    assert points[0].step < 200
    assert [point.step for point in points] == sorted({point.step for point in points})
    assert all(point.value == point.at == point.step for point in points)
    assert history.last() == {"loss": 99_999.0}


def test_points_after_a_step() -> None:
    history = History()
    for step in range(5):
        history.add(StepValues(step, 1, {"loss": float(step)}), at=0.0)
    assert [point.step for point in history.points("loss", after=2)] == [3, 4]
    assert history.points("unknown") == []
    assert history.edition == 5


def test_going_back_removes_what_is_done_again() -> None:
    history = History()
    for step in range(5):
        history.add(StepValues(step, 1, {"loss": float(step), "accuracy": 1.0}), at=0.0)
    history.add(StepValues(2, 2, {"loss": 9.0}), at=1.0)
    assert curve(history) == [(0, 0.0), (1, 1.0), (2, 9.0)]
    assert curve(history, "accuracy") == [(0, 1.0), (1, 1.0)]


def test_a_late_value_finds_its_place() -> None:
    history = History()
    for step in (1, 3):
        history.add(StepValues(step, 1, {"loss": float(step)}), at=0.0)
    history.add(StepValues(2, 1, {"loss": 2.0}), at=0.0)
    assert curve(history) == [(1, 1.0), (2, 2.0), (3, 3.0)]
