"""When contributions came and how long versions took, as a server tells of them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.membership.pulse import Pulse
from paramserver.server.times import MOST, Times
from paramserver.v1 import shard_pb2


class Clock:
    """The monotonic clock of the module, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def at(self, now: float) -> None:
        self.now = 100.0 + now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def part(worker: int, name: Name, base: int = 7, combined: bool = False) -> Any:
    return SimpleNamespace(worker=worker, name=name, base_version=base, combined=combined)


def told(times: Times, open_: dict[int, Any] | None = None) -> shard_pb2.StatsResponse:
    report = shard_pb2.StatsResponse(version=7)
    times.write(report, open_ or {}, Pulse())
    return report


def test_a_version_tells_who_came_last_and_since_when_all_others_were_there(clock: Clock) -> None:
    times = Times(timeline=3)
    parts = {buffer: part(10 + buffer // 2, SyncName(7, buffer, buffer + 1, 6)) for buffer in range(6)}
    for buffer, at in enumerate((1.0, 1.5, 0.5, 4.0, 1.2, 2.0)):  # workers 10, 10, 11, 11, 12, 12
        clock.at(at)
        times.came(buffer)
    clock.at(4.0)
    times.decided(7, parts)
    clock.at(4.3)
    times.applied()
    clock.at(4.4)
    times.published()
    (made,) = told(times).times
    assert (made.step, made.timeline, made.first, made.others, made.last) == (7, 3, 11, 12, 11)
    assert (made.first_s, made.others_s, made.last_s) == pytest.approx((0.5, 2.0, 4.0))
    assert (made.lo, made.hi, made.of) == (3, 4, 6)
    assert (made.update_s, made.forward_s, made.published_s) == pytest.approx((0.3, 0.1, 4.4))
    assert not told(times).times, "each version is told once"


def test_a_step_of_a_single_worker_has_no_others(clock: Clock) -> None:
    times = Times(1)
    times.came(0)
    times.decided(7, {0: part(10, SyncName(7, 0, 1, 1))})
    times.applied()
    times.published()
    (made,) = told(times).times
    assert (made.others, made.others_s, made.last) == (0, 0.0, 10)


@pytest.mark.parametrize("name", [SyncName(7, 0, 1, 1), AsyncName(3, 0)])
def test_a_promoted_backup_tells_of_its_own_versions_only(clock: Clock, name: Name) -> None:
    """The primary has told of the versions before, and how long a backup followed them is nobody's wait."""
    times = Times(1)
    times.came(0)
    times.decided(7, {0: part(10, name, combined=True)})
    clock.at(5.0)
    times.applied()
    times.published()
    times.came(1)
    clock.at(5.5)
    times.decided(8, {1: part(10, SyncName(8, 0, 1, 1))})
    times.applied()
    times.published()
    report = told(times)
    (made,) = report.times
    assert made.step == 8
    assert made.published_s == pytest.approx(0.5)
    assert not report.staleness


def test_the_open_step_tells_of_the_contributions_that_count(clock: Clock) -> None:
    times = Times(1)
    parts = {buffer: part(10 + buffer, SyncName(7, buffer, buffer + 1, 3)) for buffer in range(3)}
    assert not told(times, parts).HasField("open")
    for buffer in range(3):
        clock.at(1.0 + buffer)
        times.came(buffer)
    times.dropped(2)
    clock.at(9.0)
    now = told(times, parts).open
    assert (now.step, now.first, now.others) == (7, 10, 11)
    assert (now.first_s, now.others_s, now.last_s) == pytest.approx((1.0, 2.0, 9.0))


def test_of_many_versions_the_longest_are_told_in_order(clock: Clock) -> None:
    times, at = Times(1), 0.0
    for step in range(3 * MOST):
        at += 1.0 + (step % 3 == 0)
        clock.at(at)
        times.came(step)
        times.decided(step, {step: part(10, SyncName(step, 0, 1, 1))})
        times.applied()
        times.published()
    assert [made.step for made in told(times).times] == list(range(0, 3 * MOST, 3))


def test_asynchronous_contributions_tell_how_stale_they_were_and_how_long_they_took(clock: Clock) -> None:
    times = Times(1)
    for step, base in ((7, 7), (8, 6), (90, 1)):
        clock.at(step)
        times.came(step)
        clock.at(step + 0.2)
        times.decided(step, {step: part(10, AsyncName(0, step), base)})
        times.applied()
        clock.at(step + 0.5)
        times.published()
    report = told(times)
    assert [(made.asynchronous, made.last, made.others) for made in report.times] == [(True, 10, 0)] * 3
    assert report.times[0].last_s == pytest.approx(0.2)
    assert report.times[0].published_s == pytest.approx(0.5)
    assert [lag for lag, count in enumerate(report.staleness) if count] == [0, 2, 32]


def test_a_hold_names_the_slowest_worker_and_a_moment_is_none(clock: Clock) -> None:
    times = Times(1)
    times.goes_on(10)
    times.slowest((11, 12), 4)
    for at, worker, seconds in ((16.0, 10, 2.0), (32.0, 10, 0.0001), (64.0, 11, 1.0)):
        clock.at(at)
        times.waits(worker, 5)
        clock.at(at + seconds)
        times.goes_on(worker)
    found = [(hold.worker, hold.by, hold.clock, hold.seconds) for hold in told(times).held]
    assert found == [(10, 11, 4, 2.0), (11, 12, 4, 1.0)]


def test_a_worker_that_asks_again_at_the_bound_has_waited_since_it_asked_first(clock: Clock) -> None:
    times = Times(1)
    times.slowest((11,), 4)
    for at in (1.0, 6.0, 11.0):
        clock.at(at)
        times.waits(10, 5)
    clock.at(13.0)
    times.goes_on(10)
    assert [hold.seconds for hold in told(times).held] == [pytest.approx(12.0)]
