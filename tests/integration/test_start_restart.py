"""`paramserver start server | worker --restart`: dead processes come back in their places; nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.integration.harness import GONE_S, Running, complaint, read_summary, until
from tests.support.integration.roles import Cluster, alive, cluster_fixture, reference, same_result

EPOCHS = ("--epochs", "12")
ENDLESS = ("--epochs", "100000", "--pace", "0.05")
KILLED = 137


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def pid_of(cluster: Cluster, name: str, not_in: tuple[int, ...] = ()) -> int:
    """Of the present process of this name; of none of those."""

    def found() -> int:
        processes = cluster.status()["processes"]
        named = (p["pid"] for p in processes if p["name"] == name and not p["gone"] and p["state"] == "training")
        return next((pid for pid in named if pid not in not_in), 0)

    return until(f"another {name} trains", found, 60.0)


def kill(cluster: Cluster, name: str, not_in: tuple[int, ...] = ()) -> int:
    """Kill the process of this name, not the command that watches it; returns its pid."""
    pid = pid_of(cluster, name, not_in)
    os.kill(pid, signal.SIGKILL)
    return pid


def job(cluster: Cluster, workers: int, servers: int, *flags: str) -> dict[str, Any]:
    """The coordinator of a job with checkpoints; the result that it has to have."""
    wanted = reference(cluster.place, *EPOCHS)
    places = ("--checkpoint-dir", str(cluster.place.work / "ckpt"), "--checkpoint-every", "5")
    cluster.coordinator(
        *("--servers", str(servers), "--workers", str(workers), "--set", "training.slices_per_step=4"),
        *(*places, "--summary", str(cluster.place.work / "out.json"), *flags),
    )
    return wanted


def hurried(cluster: Cluster) -> tuple[str, ...]:
    """A script that is slow until told to hurry."""
    return (*EPOCHS, "--pace", "0.2", "--hurry", str(cluster.place.work / "hurry"))


@pytest.mark.long
def test_killed_processes_come_back_under_their_names_before_their_leases_end(cluster: Cluster) -> None:
    cluster.environ["PARAMSERVER_CLUSTER__LEASE_S"] = "60"
    wanted = job(cluster, 2, 2)
    for _ in range(2):
        cluster.server("--restart")
        cluster.worker(*hurried(cluster), flags=("--restart",))
    cluster.until_status("there is a checkpoint", lambda status: status["checkpoint"])
    for name in ("server-1", "worker-0"):
        begin = time.monotonic()
        first = kill(cluster, name)
        pid_of(cluster, name, (first,))
        assert time.monotonic() - begin < 30.0, "it waited for the lease"
    status = cluster.status()
    assert status["lost"] == []
    assert {p["name"] for p in status["processes"]} == {"coordinator", "server-0", "server-1", "worker-0", "worker-1"}
    (cluster.place.work / "hurry").touch()
    cluster.ended()
    same_result(read_summary(cluster.place.work / "out.json"), wanted)
    said = [running.err for running in (*cluster.servers, *cluster.workers)]
    assert sum("is started again (1 of at most 3 times in a row)" in text for text in said) == 2
    assert sum("ended unexpectedly (signal 9)" in text for text in said) == 2
    assert cluster.place.leftovers() == []


@pytest.mark.long
def test_a_server_beside_a_worker_comes_back_alone(cluster: Cluster) -> None:
    wanted = job(cluster, 1, 3)
    cluster.worker(*hurried(cluster), flags=("--with-server", "--restart"))
    cluster.server("--servers-per-host", "2", "--restart")
    cluster.until_status("there is a checkpoint", lambda status: status["checkpoint"])
    before = {p["name"]: p["pid"] for p in cluster.status()["processes"]}
    for name in ("server-0", "server-1", "server-2"):
        pid_of(cluster, name, (kill(cluster, name),))
    after = {p["name"]: p["pid"] for p in cluster.status()["processes"]}
    assert {name for name in before if before[name] != after[name]} == {"server-0", "server-1", "server-2"}
    (cluster.place.work / "hurry").touch()
    cluster.ended()
    same_result(read_summary(cluster.place.work / "out.json"), wanted)


@pytest.mark.long
def test_ten_kills_while_the_job_gets_on(cluster: Cluster) -> None:
    wanted = job(cluster, 1, 1)
    server = cluster.server("--restart")
    worker = cluster.worker(*hurried(cluster), flags=("--restart",))
    killed: tuple[int, ...] = ()
    for _ in range(5):
        for name in ("worker-0", "server-0"):
            reached = max(p["version"] for p in cluster.status()["processes"])
            killed += (kill(cluster, name, killed),)
            pid_of(cluster, name, killed)
            cluster.until_status(
                "it gets on",
                lambda status, reached=reached: max(p["version"] for p in status["processes"]) > reached + 1,
            )
    (cluster.place.work / "hurry").touch()
    cluster.ended()
    same_result(read_summary(cluster.place.work / "out.json"), wanted)
    assert (server.err + worker.err).count("ended unexpectedly (signal 9)") == 10


@pytest.mark.long
def test_a_worker_that_dies_again_and_again(cluster: Cluster) -> None:
    cluster.coordinator("--workers", "1", "--servers", "1")
    cluster.server("--restart")
    script = cluster.place.work / "dies.py"
    script.write_text("import os, signal, paramserver as ps\nps.init()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    flags = ("--restart", "--set", "cluster.max_restarts=2")
    running = cluster.place.launch(
        "start", "worker", "--join", cluster.join, *flags, "--", script, environ=cluster.environ
    )
    text = complaint(running.wait(), KILLED)
    assert text.startswith("worker has ended 3 times in a row, the last time with signal 9, and the job got no further")


def supervised(cluster: Cluster, role: str) -> tuple[Running, int]:
    """A command that supervises a process of a job that trains; the pid of the process."""
    cluster.coordinator("--workers", "1", "--servers", "1")
    server = cluster.server("--restart")
    worker = cluster.worker(*ENDLESS, "--num-workers", "1", flags=("--restart",))
    return {"server": server, "worker": worker}[role], pid_of(cluster, f"{role}-0")


@pytest.mark.parametrize("role", ["worker", pytest.param("server", marks=pytest.mark.long)])
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_signals_reach_the_process_and_its_exit_code_comes_out(
    cluster: Cluster, role: str, number: signal.Signals
) -> None:
    running, pid = supervised(cluster, role)
    if role == "worker":  # also after a restart
        pid = pid_of(cluster, "worker-0", (kill(cluster, "worker-0"),))
    running.send(number)
    done = running.wait(30.0).check(128 + number)
    # A data loader whose parent has died may write Python's own traceback.
    assert not re.search(r'File ".*/paramserver/', done.said)
    assert not alive(pid)


@pytest.mark.long
@pytest.mark.parametrize("role", ["server", "worker"])
def test_nothing_outlives_a_command_that_is_killed(cluster: Cluster, role: str) -> None:
    running, pid = supervised(cluster, role)
    running.send(signal.SIGKILL)
    until("its process is gone", lambda: not alive(pid), GONE_S)
    until("its data loaders, too", lambda: not any(f"start {role}" in line for line in commands(cluster)), GONE_S)


def commands(cluster: Cluster) -> list[str]:
    """The command lines of all processes of the cluster."""
    return list(cluster.place.processes().values())


@pytest.mark.long
def test_mistakes_are_not_made_again(cluster: Cluster) -> None:
    """A typing error in the name of the script, and a second start where one is enough."""
    cluster.coordinator("--workers", "1", "--servers", "1")
    start = ("start", "worker", "--join", cluster.join, "--restart", "--", cluster.place.work / "trian.py")
    done = cluster.place.launch(*start, environ=cluster.environ).wait()
    assert complaint(done, 2).endswith('trian.py" does not exist; give the path of a Python file')
    cluster.server("--restart")
    cluster.until_status("the server is there", lambda status: len(status["processes"]) == 2)
    done = cluster.server("--restart").wait(60.0)
    assert "already has its 1 servers" in complaint(done, 2)
    assert "started again" not in done.said


@pytest.mark.long
def test_what_a_process_writes_passes_through_whole(cluster: Cluster) -> None:
    cluster.coordinator("--workers", "1", "--servers", "1")
    cluster.server("--restart")
    script = cluster.place.work / "talks.py"
    script.write_text(
        "import sys\nprint('x' * 5_000_000)\nprint('no end', end='')\nprint('error', file=sys.stderr)\nexit(9)\n"
    )
    start = ("start", "worker", "--join", cluster.join, "--restart", "--", script)
    done = cluster.place.launch(*start, environ=cluster.environ).wait().check(9)
    assert done.out == "x" * 5_000_000 + "\nno end"
    assert "error\n" in done.err
