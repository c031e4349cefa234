"""What the coordinator makes of the reports of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paramserver.coordinator.reports import Reports
from paramserver.core.job.membership import Member, Role
from paramserver.v1 import coordinator_pb2


def test_a_newcomer_is_shown_at_the_slowest_clock_before_it_has_one() -> None:
    """Otherwise clocks would seem to be far apart while it begins. A worker that is at clock 0 is shown there."""
    workers = [Member(number, Role.WORKER, number, f"worker-{number}", 0.0, incarnation=number) for number in range(3)]
    job: Any = SimpleNamespace(members=SimpleNamespace(of=lambda role: workers, get=lambda ident: workers[ident]))
    reports = Reports(job)
    reports.workers[0] = coordinator_pb2.WorkerReport(clock=103)
    reports.workers[1] = coordinator_pb2.WorkerReport(clock=101)
    reports.workers[2] = coordinator_pb2.WorkerReport()
    assert [reports.process(worker).clock for worker in workers] == [103, 101, 101]
    reports.workers[2].clock = 0
    assert [reports.process(worker).clock for worker in workers] == [103, 101, 0]
