"""What dies during a run is started again: the processes, their number, and that the result is the same."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import SCRIPTS, Place, Running, place_fixture, read_summary, status_of, until

TRAIN = SCRIPTS / "train.py"
EPOCHS = ("--epochs", "12")
SAME = ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied")
# A worker that dies as often as it is started.
DIES = "import os, signal, paramserver as ps\nps.init()\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture(scope="module")
def wanted() -> Iterator[dict[str, Any]]:
    """The result without faults."""
    with Place() as place:
        path = place.work / "alone.json"
        environ = {"PARAMSERVER_RUN__SUMMARY": str(path), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
        place.python(TRAIN, *EPOCHS, environ=environ).check()
        yield read_summary(path)


class Run:
    """A run that is slow until told to hurry."""

    def __init__(self, place: Place, workers: int, *flags: str, pace_s: float = 0.3) -> None:
        self.place = place
        self.summary: Path = place.work / "out.json"
        self.hurry: Path = place.work / "hurry"
        self.running: Running = place.launch(
            "run",
            TRAIN,
            *(
                "--servers",
                "2",
                "--workers",
                str(workers),
                "--slices-per-step",
                "4",
                *flags,
            ),
            "--summary",
            self.summary,
            *("--", *EPOCHS, "--pace", str(pace_s), "--hurry"),
            self.hurry,
        )
        self.running.wait_for(r"worker-\d \| rank \d of \d trains", count=workers)

    def pid(self, name: str) -> int:
        """Of the present process of this name."""

        def found() -> int:
            processes = status_of(self.running)["processes"]
            return next((p["pid"] for p in processes if p["name"] == name and not p["gone"]), 0)

        return until(f"{name} is a member", found, 20.0)

    def kill(self, name: str) -> int:
        """Kill it; returns its pid."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def finish(self) -> dict[str, Any]:
        """Let it end well; the summary."""
        self.hurry.touch()
        self.running.wait().check()
        assert self.place.leftovers() == []
        return read_summary(self.summary)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in SAME:
        assert found[key] == wanted[key], key


@pytest.mark.long
def test_all_workers_killed_and_replaced(place: Place, wanted: dict[str, Any]) -> None:
    run = Run(place, 2)
    for name in ("worker-0", "worker-1"):
        run.kill(name)
    run.running.wait_for(r"worker-\d \| rank \d of \d trains", count=4)
    found = run.finish()
    assert found["restarts"] == {"worker-0": 1, "worker-1": 1}
    same(found, wanted)


@pytest.mark.long
def test_a_coordinator_and_a_server_that_hang_are_started_again(place: Place, wanted: dict[str, Any]) -> None:
    run = Run(place, 2, "--set", "cluster.lease_s=1")
    os.kill(run.pid("coordinator"), signal.SIGSTOP)
    run.running.wait_for(r"coordinator has not answered for \d s; it is killed")
    run.running.wait_for(r"coordinator is started again \(1 of at most 3 times in a row\)")
    run.running.wait_for("took over")
    os.kill(run.pid("server-1"), signal.SIGSTOP)
    run.running.wait_for("server-1 runs, but the coordinator has given it up for lost; it is killed")
    run.running.wait_for(r"the job went back to version \d+ on timeline 1")
    found = run.finish()
    assert found["restarts"] == {"coordinator": 1, "server-1": 1}
    same(found, wanted)


def test_servers_with_backups_are_killed_and_restarted_while_training_goes_on(
    place: Place, wanted: dict[str, Any]
) -> None:
    run = Run(place, 2, "--replicas", "1", pace_s=1.0)
    run.kill("server-1")
    run.running.wait_for("server-1 is started again")
    run.running.wait_for("a backup has all of the shard", count=4)
    place.paramserver("restart", "servers").check()
    found = run.finish()
    assert found["rollbacks"] == found["steps_redone"] == 0
    same(found, wanted)


@pytest.mark.long
def test_a_server_with_backups_that_is_stopped_and_goes_on(place: Place, wanted: dict[str, Any]) -> None:
    """SIGSTOP until it is given up for lost, then SIGCONT: it is a backup again, and nobody starts it again."""
    run = Run(place, 2, "--replicas", "1", "--set", "cluster.lease_s=3")

    def shards() -> set[str]:
        return {shard["state"] for shard in status_of(run.running)["shards"]}

    until("all shards have backups", lambda: shards() == {"replicated"}, 20.0)
    pid = run.pid("server-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        run.running.wait_for("a server is gone; backups go on with its shards")
        missed = status_of(run.running)
        assert missed["state"] == "degraded"
        assert missed["reason"].startswith("server-1 is lost; server-0 holds its shards")
    finally:
        os.kill(pid, signal.SIGCONT)
    run.running.wait_for("this server was given up for lost, and other servers hold its shards: it drops them")
    until("all shards have backups again", lambda: shards() == {"replicated"}, 20.0)
    assert run.pid("server-1") == pid
    found = run.finish()
    assert (found["restarts"], found["rollbacks"], found["steps_redone"]) == ({}, 0, 0)
    assert (found["takeovers"], found["repairs"]) == (1, 1)
    same(found, wanted)


@pytest.mark.long
def test_the_store_is_started_again(place: Place, wanted: dict[str, Any]) -> None:
    run = Run(place, 2)
    (pid,) = [pid for pid, command in place.processes().items() if "valkey-server" in command]
    os.kill(pid, signal.SIGKILL)
    run.running.wait_for(r"the embedded store ended unexpectedly \(signal 9\) and was started again")
    # It holds what a new coordinator has to know.
    run.kill("coordinator")
    run.running.wait_for("took over")
    found = run.finish()
    assert found["restarts"] == {"store": 1, "coordinator": 1}
    same(found, wanted)


@pytest.mark.long
def test_a_worker_that_dies_again_and_again(place: Place) -> None:
    script = place.work / "dies.py"
    script.write_text(DIES)
    flags = ("--servers", "1", "--workers", "1", "--set", "cluster.max_restarts=1")
    done = place.paramserver("run", script, *flags).check(137)
    assert (
        "paramserver: error: worker-0 has ended 2 times in a row, the last time with signal 9, and the job got no "
        "further in between; cluster.max_restarts is 1\n"
    ) in done.err
    assert re.findall(r"worker-0 is started again( in [\d.]+ s)? \((\d) of at most 1", done.out) == [("", "1")]
    assert place.leftovers() == []


def test_servers_are_started_again_and_the_job_goes_back(place: Place, wanted: dict[str, Any]) -> None:
    run = Run(place, 2, "--checkpoint-every", "5")
    run.running.wait_for(r"checkpoint .*version=5")
    run.kill("server-1")
    run.running.wait_for(r"the job went back to version [1-9]\d* on timeline 1; \d+ steps are done again")
    for name in ("server-0", "server-1"):
        run.kill(name)
    run.running.wait_for(r"the job went back to version \d+ on timeline [2-9]")
    found = run.finish()
    assert found["restarts"] == {"server-0": 1, "server-1": 2}
    same(found, wanted)


@pytest.mark.long
def test_a_server_is_killed_in_a_run_without_a_directory_for_checkpoints(place: Place, wanted: dict[str, Any]) -> None:
    """It costs some seconds of training, and not all steps since the start."""
    run = Run(place, 2, "--set", "cluster.max_idle_s=30", pace_s=0.8)
    assert "the steps since the last checkpoint are done again; there is one every 5 s" in run.running.out
    until("a checkpoint", lambda: not status_of(run.running)["checkpoint"].startswith("step-00000000-"), 60.0)
    run.kill("server-1")
    run.running.wait_for(r"the job went back to version [1-9]\d* on timeline 1; \d+ steps are done again")
    found = run.finish()
    assert found["rollbacks"] == 1
    same(found, wanted)
