"""How runs end by a signal, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import GONE_S, Place, place_fixture, until
from tests.support.integration.paced import TRAIN, counts, training


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def job_files(place: Place) -> list[Path]:
    return list((place.temporary / f"paramserver-{os.getuid()}").glob("*"))


def test_ctrl_c_stops_everything(place: Place) -> None:
    running = training(place, 1, 2)
    assert len(job_files(place)) == 1
    commands = " ".join(place.processes().values())
    for part in ("valkey-server", "guard.py", "roles.child coordinator", "roles.child server", "roles.child worker"):
        assert part in commands
    begin = time.monotonic()
    running.send(signal.SIGINT)
    done = running.wait(GONE_S).check(130)
    place.wait_until_gone(begin)
    assert "Traceback" not in done.said, done.text
    assert "error" not in done.said, done.text
    assert place.leftovers() == []


def test_sigterm_while_everything_starts(place: Place) -> None:
    running = place.launch("run", TRAIN, *counts(1, 1))
    running.wait_for("coordinator at ")
    begin = time.monotonic()
    running.send(signal.SIGTERM)
    done = running.wait(GONE_S).check(143)
    place.wait_until_gone(begin)
    assert "Traceback" not in done.said, done.text
    assert place.leftovers() == []


def test_killed_launcher_leaves_nothing(place: Place) -> None:
    running = training(place, 1, 2, script=("--num-workers", "1"))
    # Launcher, guard, store, coordinator, server, two workers with a loading process each.
    until("the loading processes", lambda: len(place.processes()) >= 9, 30.0)
    begin = time.monotonic()
    running.send(signal.SIGKILL)
    place.wait_until_gone(begin)
    assert running.wait(GONE_S).code == -signal.SIGKILL
    until("the directory of the run is gone", lambda: not list(place.temporary.glob("paramserver-*/store")), GONE_S)
    # The file of the dead job is no running job.
    assert "no job runs" in place.paramserver("status").check(3).err
    # Python's own multiprocessing had no chance to remove its directories.
    assert [name for name in place.leftovers() if not name.startswith("pymp-")] == []
