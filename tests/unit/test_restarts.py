"""When a process of a run is started again, and when that is enough."""

from __future__ import annotations

from paramserver.processes.restarts import Restarts, cool_down_s


def test_each_pause_is_longer_than_the_one_before() -> None:
    pauses = [cool_down_s(failures) for failures in range(1, 8)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert cool_down_s(100) == 30.0


def test_too_often_without_getting_any_further() -> None:
    restarts = Restarts(2)
    restarts.started("server-0")
    assert restarts.failed("server-0") == 0.0
    restarts.started("server-0")
    assert restarts.failed("server-0") == 0.5
    restarts.started("server-0")
    assert restarts.failed("server-0") is None
    assert restarts.failures("server-0") == 3
    assert restarts.total == {"server-0": 2}


def test_a_version_that_is_new_makes_up_for_all_failures() -> None:
    restarts = Restarts(1)
    for version in range(1, 20):
        restarts.started("worker-1")
        restarts.reached(version)
        assert restarts.failed("worker-1") == 0.0
    assert restarts.total == {"worker-1": 19}


def test_getting_as_far_as_before_is_no_progress() -> None:
    restarts = Restarts(1)
    restarts.started("server-0")
    restarts.reached(10)
    assert restarts.failed("server-0") == 0.0
    restarts.started("server-0")
    for version in range(11):  # rolled back, and gone as far as the last time
        restarts.reached(version)
    assert restarts.failed("server-0") is None


def test_processes_are_counted_apart() -> None:
    restarts = Restarts(1)
    for name in ("server-0", "worker-0"):
        restarts.started(name)
        assert restarts.failed(name) == 0.0
    restarts.started("worker-0")
    assert restarts.failed("worker-0") is None
    assert restarts.total == {"server-0": 1, "worker-0": 1}


def test_zero_is_never() -> None:
    restarts = Restarts(0)
    restarts.started("server-0")
    restarts.reached(5)
    assert restarts.failed("server-0") is None
    assert restarts.total == {}
