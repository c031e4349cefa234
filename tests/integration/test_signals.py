"""How runs end by a signal, and that nothing of them is left."""

from __future__ import annotations

import gzip
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import GONE_S, SCRIPTS, Place, place_fixture, until
from tests.support.integration.paced import TRAIN, counts, training

ENDS = SCRIPTS / "ends.py"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def job_files(place: Place) -> list[Path]:
    return list(place.runtime.glob("*"))


def test_ctrl_c_stops_everything(place: Place) -> None:
    running = training(place, 1, 2)
    assert {path.suffix for path in job_files(place)} == {".json", ".token"}
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


def test_ctrl_c_reaches_the_script_and_a_second_one_ends_it_at_once(place: Place) -> None:
    """The command is started as nohup starts it, and gets signals that end other programs first."""
    command = [sys.executable, "-m", "paramserver", "run", str(ENDS), *counts(1, 1), "--checkpoint-dir", "ckpt"]
    running = place.start("sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command, "--", "stay")
    running.wait_for("trains")
    running.send(signal.SIGHUP)
    running.send(signal.SIGUSR1)
    running.wait_for("SIGUSR1 has come, and no script has a handler for it: nothing changes")
    running.send(signal.SIGINT)
    running.wait_for(r"worker-0 \| saved")
    assert (place.work / "saved.pt").exists()
    running.send(signal.SIGINT)
    done = running.wait(GONE_S).check(130)
    assert "the scripts get a KeyboardInterrupt and have 60 s; Ctrl-C again ends them at once" in done.out
    assert f"is saved; go on with: paramserver run --resume {place.work / 'ckpt'}\n" in done.out
    assert place.leftovers() == []


def wrote_everything(place: Place) -> bool:
    """Whether the script's files have what it wrote, and its exit function has run."""
    with gzip.open(place.work / "packed.gz", "rt") as packed:
        assert packed.read() == "packed\n"
    return (place.work / "table.csv").read_text().split() == ["a,b", "1,2"] and (place.work / "exit").exists()


def test_files_and_exit_functions_of_a_script_that_ends_with_another_code(place: Place) -> None:
    place.paramserver("run", ENDS, *counts(1, 1), "--", "code").check(7)
    assert wrote_everything(place)


@pytest.mark.long
def test_files_and_exit_functions_of_a_script_that_is_told_to_end(place: Place) -> None:
    running = place.launch("run", ENDS, *counts(1, 1), "--", "stay")
    running.wait_for("trains")
    running.send(signal.SIGTERM)
    running.wait(GONE_S).check(143)
    assert wrote_everything(place)


def test_iterators_that_are_open_at_the_end_of_a_script(place: Place) -> None:
    """Python ends them when torch must not be called any more."""
    done = place.python(ENDS, "open").check()
    assert "the script has come to its end" in done.out
    assert "Exception" not in done.err, done.text
