"""How runs end by an error or a death, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.integration.harness import Place, place_fixture, read_summary, status_of
from tests.support.integration.paced import TRAIN, counts, training

FAST_STORE = ["--store", "memory"]
# Nothing that dies is started again; test_restarts.py is about that.
ALONE = ["--set", "cluster.max_restarts=0"]
# One worker leaves, the other one would wait for hours.
LEAVES = """
import os, sys, time
if os.environ["PARAMSERVER_INTERNAL_INDEX"] == "1":
    sys.exit(7)
time.sleep(10000)
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def pid_of(status: dict[str, Any], name: str) -> int:
    (pid,) = [process["pid"] for process in status["processes"] if process["name"] == name]
    assert isinstance(pid, int)
    return pid


def test_script_that_raises(place: Place) -> None:
    script = ["--", "--misbehave", "1:3:raise"]
    done = place.paramserver("run", TRAIN, *counts(1, 2), *FAST_STORE, *script).check(1)
    shown = [line.removeprefix("worker-1 | ") for line in done.out.splitlines() if line.startswith("worker-1 | ")]
    begin = shown.index("Traceback (most recent call last):")
    assert shown[-1] == "RuntimeError: the cat sat on the keyboard"
    frames = [line for line in shown[begin:] if line.startswith("  File ")]
    assert len(frames) == 3
    assert all(f'File "{TRAIN}"' in frame for frame in frames)
    assert done.said.count("Traceback") == 1, done.text
    assert "worker-1 failed with exit code 1" in done.out
    assert place.leftovers() == []


@pytest.mark.long
def test_script_that_cannot_be_compiled(place: Place) -> None:
    script = place.work / "broken.py"
    script.write_text("import paramserver as ps\nctx = = 1\n")
    done = place.paramserver("run", script, *counts(1, 1), *FAST_STORE).check(1)
    shown = [line for line in done.out.splitlines() if line.startswith("worker-0 | ")]
    assert shown[-1] == "worker-0 | SyntaxError: invalid syntax"
    assert [line for line in shown if "  File " in line] == [f'worker-0 |   File "{script}", line 2']


def test_exit_code_of_a_script(place: Place) -> None:
    script = place.work / "leaves.py"
    script.write_text(LEAVES)
    done = place.paramserver("run", script, *counts(1, 2), *FAST_STORE).check(7)
    assert "worker-1 failed with exit code 7" in done.out
    assert "Traceback" not in done.said, done.text


@pytest.mark.long
def test_slices_of_a_killed_worker_go_to_the_others(place: Place) -> None:
    alone, path = place.work / "alone.json", place.work / "killed.json"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(alone), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
    place.python(TRAIN, environ=environ).check()
    flags = ["--slices-per-step", "4", "--summary", str(path), *ALONE]
    done = place.paramserver("run", TRAIN, *counts(2, 2), *flags, "--", "--misbehave", "1:5:kill").check()
    assert "worker-1 was killed by signal 9; its slices go to the others" in done.out
    well, killed = read_summary(alone), read_summary(path)
    for key in ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied"):
        assert killed[key] == well[key], key
    assert place.leftovers() == []


def test_all_workers_killed(place: Place) -> None:
    running = training(place, 1, 1, *FAST_STORE, *ALONE)
    os.kill(pid_of(status_of(running), "worker-0"), signal.SIGKILL)
    done = running.wait().check(137)
    assert "worker-0 was killed by signal 9" in done.out
    assert "Traceback" not in done.said, done.text


def test_killed_server_ends_the_run(place: Place) -> None:
    running = training(place, 2, 1, *FAST_STORE, *ALONE)
    os.kill(pid_of(status_of(running), "server-1"), signal.SIGKILL)
    done = running.wait(30.0).check(1)
    assert "paramserver: error: server-1 ended unexpectedly (signal 9); the run cannot go on\n" in done.err
    assert "Traceback" not in done.said, done.text
    assert place.processes() == {}
    assert place.leftovers() == []
