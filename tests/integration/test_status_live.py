"""What is seen of a running job, and what can be changed: `status`, `set`, the table on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import fetch_status
from tests.support.integration.harness import SCRIPTS, Place, place_fixture, read_summary, until
from tests.support.integration.terminal import Terminal

TRAIN = SCRIPTS / "train.py"
SLICES, SAMPLES, EPOCHS = 15, 230, 40
# At this pace the job takes two minutes; it has to hurry once the test has seen enough.
PACE = ["--epochs", str(EPOCHS), "--pace", "0.4"]


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def by_name(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {process["name"]: process for process in status["processes"]}


def slowest(status: dict[str, Any], key: str) -> int:
    return min(int(process[key]) for process in status["processes"] if process["role"] == "worker")


def test_status_and_changes_of_a_running_job(place: Place) -> None:
    hurry, path = place.work / "hurry", place.work / "summary.json"
    flags: list[str | Path] = ["--servers", "2", "--workers", "2", "--set", "log.interval_s=0.5", "--summary", path]
    running = place.launch("run", TRAIN, *flags, "--", *PACE, "--hurry", hurry)
    running.wait_for(r"rank \d of 2 trains", count=2)

    # Processes report twice a second.
    states = {"training"}
    until("reports", lambda: {p["state"] for p in place.status()["processes"]} == states, 30.0)
    status = place.status()
    assert (status["state"], status["mode"], status["staleness"]) == ("training", "sync", None)
    assert re.fullmatch(r"train-[0-9a-f]{6}", status["job"])
    _check_processes(place, status)
    address = by_name(status)["coordinator"]["address"]
    assert isinstance(address, str)

    def look() -> dict[str, Any]:
        """The same as `paramserver status`, without starting a process for it."""
        return describe(fetch_status(address, security=place.security(address)))

    until("steps", lambda: slowest(look(), "version") > slowest(status, "version"), 30.0)
    assert [p["pid"] for p in look()["processes"]] == [p["pid"] for p in status["processes"]]

    def change(*tokens: str, mode: str, staleness: int | str | None, says: str) -> None:
        assert re.search(says, place.paramserver("set", *tokens).check().out)
        status = look()
        assert (status["mode"], status["staleness"]) == (mode, staleness)
        begin = by_name(status)["server-0"]["version"]
        until("progress", lambda: by_name(look())["server-0"]["version"] > begin, 30.0)

    change("consistency.mode=async", "--staleness", "4", mode="async", staleness=4, says="mode async, staleness 4")
    assert place.status()["mode"] == "async"
    clocks = slowest(look(), "clock")
    until("clocks", lambda: slowest(look(), "clock") > clocks, 30.0)
    change("--staleness", "unbounded", mode="async", staleness="unbounded", says="mode async, staleness unbounded")
    change("consistency.mode=sync", mode="sync", staleness=None, says=r"mode sync, from version \d+ on")
    refused = place.paramserver("set", "consistency.staleness=-1")
    assert refused.check(2).err.startswith("paramserver: error: consistency.staleness is ")
    change("consistency.mode=async", "--staleness", "0", mode="async", staleness=0, says="staleness 0")

    hurry.touch()
    done = running.wait().check()
    summary = read_summary(path)
    assert (summary["mode"], summary["staleness"]) == ("async", 0)
    # Every slice of every epoch once, whatever the mode was at the time.
    assert summary["contributions_applied"] == EPOCHS * SLICES
    assert summary["samples"] == EPOCHS * SAMPLES
    assert summary["metrics"]["test_accuracy"] > 0.8
    # Without a terminal: lines, in both modes, and nothing to steer a terminal with.
    assert re.search(r"^· sync · .* samples/s · loss \d", done.out, re.MULTILINE)
    assert re.search(r"^· async, staleness 4 · ", done.out, re.MULTILINE)
    assert "\x1b" not in done.said
    assert "Traceback" not in done.said, done.text


def _check_processes(place: Place, status: dict[str, Any]) -> None:
    processes = by_name(status)
    assert set(processes) == {"coordinator", "server-0", "server-1", "worker-0", "worker-1"}
    commands = place.processes()
    for name, process in processes.items():
        role = name.partition("-")[0]
        assert process["role"] == role
        assert f"roles.child {role}" in commands[process["pid"]], name
        assert type(process["version"]) is type(process["clock"]) is int
        assert (process["state"], process["gone"]) == ("training", False)
        assert process["address"], name
        assert process["transport"] == ("shm" if role == "worker" else "")
        if role != "worker":
            assert re.fullmatch(r"127\.0\.0\.1:\d+", process["address"])
    assert len({process["pid"] for process in processes.values()}) == 5


@pytest.mark.long
def test_two_jobs_at_once(place: Place) -> None:
    stop = place.work / "stop"
    flags = ["--servers", "1", "--workers", "1", "--store", "memory"]
    arguments: list[str | Path] = ["--", "--stop", stop]
    jobs = [place.launch("run", SCRIPTS / "count.py", *flags, "--job", name, *arguments) for name in ("ant", "bee")]
    for running in jobs:
        running.wait_for("rank 0 counts")
    for name in ("ant", "bee"):
        status = place.status("--job", name)
        assert status["job"] == name
        assert len(status["processes"]) == 3
    unsaid = place.paramserver("status", "--json").check(2)
    assert unsaid.err == "paramserver: error: 2 jobs run here (ant, bee); choose one with --job NAME\n"
    assert place.paramserver("set", "consistency.mode=async").check(2).err == unsaid.err
    unknown = place.paramserver("status", "--job", "cat").check(3)
    assert unknown.err == 'paramserver: error: no job named "cat" runs here; running: ant, bee\n'
    twice = place.paramserver("run", SCRIPTS / "count.py", *flags, "--job", "ant", *arguments).check(2)
    assert twice.err.startswith('paramserver: error: a job named "ant" runs already (process ')
    place.paramserver("set", "consistency.mode=async", "--staleness", "1", "--job", "bee").check()
    assert [place.status("--job", name)["mode"] for name in ("ant", "bee")] == ["sync", "async"]
    stop.touch()
    for running in jobs:
        running.wait().check()
    assert place.paramserver("status").check(3).err.startswith("paramserver: error: no job runs on this machine")
    assert place.leftovers() == []


@pytest.mark.long
def test_table_on_a_terminal(place: Place) -> None:
    hurry = place.work / "hurry"
    tokens: list[str | Path] = ["run", TRAIN, "--servers", "1", "--workers", "1", "--store", "memory", "--"]
    with Terminal(place, [*tokens, "--epochs", "6", "--pace", "0.2", "--bar", "--hurry", hurry]) as terminal:
        terminal.wait_for(r"rank 0 of 1 trains")
        for words in (r"job train-[0-9a-f]{6}", "name", "state", "step", "samples/s", "loss", "why"):
            terminal.wait_for(words)
        terminal.wait_for(r"worker-0 .*training")
        terminal.wait_for(r"server-0 .*training")
        terminal.wait_for(r"epoch 1 of 6 .*━.* [1-9]\d?/15 slices")
        terminal.wait_for(r"sync .*━.* [1-9]\d*/90 slices +\d:\d\d:\d\d left · \d+\.\d steps/s · loss \d\.\d{4}")
        terminal.wait_for(r"worker-0 \| script's bar: [1-9]")
        hurry.touch()
        assert terminal.wait() == 0
        assert re.search(r"90/90 slices", terminal.text)
        assert re.search(r"done: sync, 90 steps in ", terminal.text)
        assert "Traceback" not in terminal.text


@pytest.mark.long
def test_top_waits_for_a_job_and_follows_another_coordinator(place: Place) -> None:
    hurry = place.work / "hurry"
    with Terminal(place, ["top"]) as terminal:
        terminal.wait_for("waiting for a job .*no job runs on this machine")
        running = place.launch("run", TRAIN, "--servers", "1", "--workers", "1", "--", *PACE, "--hurry", hurry)
        terminal.wait_for(r"job: [1-9]\d*/600 slices, \d:\d\d:\d\d left")
        terminal.wait_for(r"samples/s +[1-9]\d*  .*[▂▃▄▅▆▇█]")
        said = place.paramserver("logs", "worker-0").check().out
        assert re.search(r"^\d\d:\d\d:\d\d worker-0 \| rank 0 of 1 trains", said, re.MULTILINE)
        follower = place.launch("logs", "--follow")
        follower.wait_for(r"worker-0 \| rank 0 of 1 trains")
        os.kill(by_name(place.status())["coordinator"]["pid"], signal.SIGKILL)
        terminal.wait_for(r"another coordinator leads the job \(term 2, before: 1\)")
        hurry.touch()
        running.wait().check()
        assert follower.wait().check().err == "The job has ended.\n"
        terminal.wait_for("NO COORDINATOR ANSWERS since .*no job runs on this machine")
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.echoes, "the terminal is as it was"
        assert "Traceback" not in terminal.text
