"""One run, many kills: nothing piles up, and the result is the one without faults. `SOAK_KILLS` says how many."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import SCRIPTS, Place, place_fixture, read_summary, until

TRAIN = SCRIPTS / "train.py"
KILLS = int(os.environ.get("SOAK_KILLS", "100"))
SAME = ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied")
# A kill, the detection, the roll-back and a few steps on a busy machine.
ONE_S = 60.0


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def members(place: Place) -> dict[str, int]:
    """The living processes of the job by name; empty while the coordinator cannot be asked."""
    done = place.paramserver("status", "--json")
    if done.code:
        return {}

    facts = json.loads(done.out)
    if facts["state"] != "training":
        return {}
    return {p["name"]: p["pid"] for p in facts["processes"] if p["state"] == "training"}


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def zombies(parent: int) -> list[int]:
    """Children of this process that nobody has waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z" and int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


@pytest.mark.timeout(ONE_S * KILLS + 600.0)
def test_k02_many_kills(place: Place) -> None:
    rng = random.Random(7)
    alone, summary, hurry = place.work / "alone.json", place.work / "out.json", place.work / "hurry"
    epochs = ("--epochs", str(20 + 10 * KILLS))
    flags = ("--servers", "2", "--workers", "2", "--slices-per-step", "4", "--checkpoint-every", "5")
    running = place.launch(
        *("run", TRAIN, *flags, "--set", "cluster.max_restarts=100", "--summary", summary),
        *("--", *epochs, "--pace", "0.2", "--hurry", hurry),
    )
    running.wait_for(r"worker-\d \| rank \d of \d trains", count=2)
    launcher_files: list[int] = []
    coordinator_files: list[int] = []
    killed: dict[str, int] = {}
    shared = set(os.listdir("/dev/shm"))
    begin = time.monotonic()
    for number in range(KILLS):
        there = until("everybody is at work", lambda: _all_at_work(place), ONE_S)
        name = rng.choice(["server-0", "server-1", "worker-0", "worker-1"])
        launcher_files.append(open_files(running.pid))
        coordinator_files.append(open_files(there["coordinator"]))
        os.kill(there[name], signal.SIGKILL)
        killed[name] = killed.get(name, 0) + 1
        until("it is noticed", lambda pid=there[name]: not Path(f"/proc/{pid}").exists(), 10.0)  # type: ignore[misc]
        assert not running.ended, f"after {number} kills\n{running.out}\n{running.err}"
    until("everybody is at work", lambda: _all_at_work(place), ONE_S)
    print(
        f"K02: {KILLS} kills in {time.monotonic() - begin:.0f} s; open files of the launcher {launcher_files[0]} to "
        f"{launcher_files[-1]} (most {max(launcher_files)}), of the coordinator {coordinator_files[0]} to "
        f"{coordinator_files[-1]} (most {max(coordinator_files)})"
    )
    assert zombies(running.pid) == []
    assert max(launcher_files) <= launcher_files[0] + 10
    assert max(coordinator_files) <= coordinator_files[0] + 20
    hurry.touch()
    running.wait(280.0).check()
    found: dict[str, Any] = read_summary(summary)
    assert found["restarts"] == killed
    environ = {"PARAMSERVER_RUN__SUMMARY": str(alone), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
    place.start(sys.executable, TRAIN, *epochs, environ=environ).wait(280.0).check()
    wanted = read_summary(alone)
    assert {key: found[key] for key in SAME} == {key: wanted[key] for key in SAME}
    assert place.processes() == {}
    assert place.leftovers() == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("torch_", "psm_"))} == set()


def _all_at_work(place: Place) -> dict[str, int]:
    there = members(place)
    return there if {"server-0", "server-1", "worker-0", "worker-1"} <= set(there) else {}
