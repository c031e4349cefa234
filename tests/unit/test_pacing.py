"""When the coordinator begins a checkpoint: by versions, or by time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from paramserver.coordinator.history import pacing
from paramserver.coordinator.history.pacing import Pacing
from paramserver.coordinator.options import CheckpointOptions
from paramserver.core.versions.consistency import Mode


class Clock:
    """Stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize("mode", Mode)
def test_by_time(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pacing(CheckpointOptions("ckpt", every_s=60.0))
    assert not pace.due(5, mode)
    clock.now += 60.0
    assert not pace.due(0, mode), "nothing has been made since version 0"
    assert pace.due(5, mode)
    pace.begun(6)
    assert not pace.due(7, mode)
    clock.now += 60.0
    assert not pace.due(6, mode), "there is a checkpoint of this version"
    assert pace.due(7, mode)
    pace.restart(3)
    assert not pace.due(7, mode), "the time begins anew when the job goes back"
    clock.now += 60.0
    assert pace.due(4, mode)


def test_by_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then time does not count, and synchronous shards need nobody who says when."""
    clock = Clock(monkeypatch)
    pace = Pacing(CheckpointOptions("ckpt", every=10, every_s=60.0))
    clock.now += 600.0
    assert not pace.due(9, Mode.ASYNC)
    assert pace.due(10, Mode.ASYNC)
    assert not pace.due(10, Mode.SYNC)
    pace.begun(10)
    assert not pace.due(19, Mode.ASYNC)
    pace.begun(21)
    assert not pace.due(29, Mode.ASYNC)
    assert pace.due(30, Mode.ASYNC)
    pace.restart(7)
    assert not pace.due(9, Mode.ASYNC)
    assert pace.due(10, Mode.ASYNC)


@pytest.mark.parametrize(
    "options", [CheckpointOptions("ckpt"), CheckpointOptions(every=1), CheckpointOptions(every_s=1)]
)
def test_never(options: CheckpointOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pacing(options)
    clock.now += 1e6
    assert not [mode for mode in Mode if pace.due(1000, mode)]


def test_versions_at_which_something_is_left_out_are_passed_over() -> None:
    pace = Pacing(CheckpointOptions("ckpt", every_s=1.0, multiple=100))
    assert [pace.possible(version) for version in (1, 99, 100, 101)] == [100, 100, 100, 200]
    assert Pacing(CheckpointOptions("ckpt", every_s=1.0)).possible(7) == 7


def test_checkpoints_that_nobody_has_asked_for_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model is saved more seldom. The interval that a user has set stays."""
    clock = Clock(monkeypatch)
    sparing = Pacing(CheckpointOptions("ckpt", every_s=5.0, sparing=True))
    asked = Pacing(CheckpointOptions("ckpt", every_s=5.0))
    for seconds, interval in ((0.1, 5.0), (2.0, 40.0), (0.5, 10.0), (0.0, 5.0)):
        for pace in (sparing, asked):
            pace.took(seconds)
            pace.restart(0)
        clock.now += interval - 0.1
        assert not sparing.due(9, Mode.SYNC)
        assert asked.due(9, Mode.SYNC) is (interval > 5.0)
        clock.now += 0.2
        assert sparing.due(9, Mode.SYNC)


def test_a_young_job_saves_more_often_than_every_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a loss in the first minutes does not cost everything since the start."""
    clock = Clock(monkeypatch)
    began = clock.now
    pace = Pacing(CheckpointOptions("ckpt", every_s=300.0, rising=True))
    taken = []
    while clock.now < began + 7200:
        clock.now += 1.0
        if pace.due(int(clock.now - began), Mode.SYNC):
            pace.begun(int(clock.now - began))
            taken.append(clock.now - began)
    waits = [later - sooner for sooner, later in itertools.pairwise([0.0, *taken])]
    assert taken[0] == 5.0
    assert all(wait <= max(5.0, 0.1 * at) + 1.0 for wait, at in zip(waits, taken, strict=True))
    assert waits == sorted(waits)
    assert set(waits[-10:]) == {300.0}
    assert len(taken) < 80
