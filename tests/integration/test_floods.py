"""Strangers flood each port of a job whose processes have 1,024 descriptors: the job does not feel it.

The short form is in tests/contract: `test_bulk.py`, `test_limits.py` and `test_site.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import fetch_status
from paramserver.transport.security.access import Security
from tests.support.contract.trust import JOIN, member, plain
from tests.support.integration import flood
from tests.support.integration.harness import ROOT, Place, Running, until
from tests.support.integration.roles import Cluster

pytestmark = pytest.mark.long

FILES = 1024
# Seconds over which a rate is measured: 100 steps at the pace of the script.
WINDOW_S = 10.0
PORTS = ("coordinator", "dashboard", "server", "bulk", "metrics")


class Small(Place):
    """Its commands may have few descriptors, and cannot ask for more."""

    def launch(self, *tokens: str | Path, cwd: Path | None = None, environ: Any = None) -> Running:
        """See `Place`."""
        limited = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
        return self.start(*limited, sys.executable, "-m", "paramserver", *tokens, cwd=cwd, environ=environ)


class Job:
    """A job that trains at a steady pace, over sockets, with tokens; with or without TLS."""

    def __init__(self, place: Place, tls: bool) -> None:
        self.hurry = place.work / "hurry"
        self.cluster = Cluster(place)
        certs = place.work / "certs"
        place.paramserver("certs", "init", certs).check()
        flags: tuple[str | Path, ...] = ("--certs", certs) if tls else ()
        self.security: Security = member(certs, "worker") if tls else plain([JOIN])
        self.cluster.environ |= {
            "PARAMSERVER_CLUSTER__TRANSPORT": "bulk",
            "PARAMSERVER_CLUSTER__HOST_TIER": "off",
            **({} if tls else {"PARAMSERVER_SECURITY__TOKEN": JOIN}),
        }
        self.coordinator = self.cluster.coordinator(
            *("--workers", "2", "--set", "training.slices_per_step=4", "--dashboard", "127.0.0.1:0", *flags)
        )
        self.server = self.cluster.server("--metrics", "127.0.0.1:0", *flags)
        for _ in range(2):
            self.cluster.worker("--epochs", "100000", "--pace", "0.05", "--hurry", self.hurry, flags=flags)
        until("steps", lambda: self.steps() > 20, 60.0)

    def status(self) -> dict[str, Any]:
        """As a newcomer hears it, over a connection of its own."""
        return describe(fetch_status(self.cluster.join, 10.0, self.security))

    def steps(self) -> int:
        """Steps that the server has done."""
        return max((int(p.get("version") or 0) for p in self.status()["processes"] if p["role"] == "server"), default=0)

    def rate(self) -> float:
        """Steps per second."""
        first, began = self.steps(), time.monotonic()
        until("the end of the window", lambda: time.monotonic() > began + WINDOW_S, 2 * WINDOW_S)
        return (self.steps() - first) / (time.monotonic() - began)

    def port(self, which: str) -> tuple[int, str]:
        """The port, and the protocol there."""
        processes = {p["name"]: p for p in self.status()["processes"]}
        server = int(processes["server-0"]["address"].rpartition(":")[2])
        metrics = int(processes["server-0"]["metrics_url"].rpartition(":")[2].partition("/")[0])
        if which == "bulk":
            (bulk,) = listening(processes["server-0"]["pid"]) - {server, metrics}
            return bulk, "bulk"
        dashboard = int(self.status()["dashboard"].rpartition(":")[2].partition("/")[0])
        coordinator = int(self.cluster.join.rpartition(":")[2])
        found = {"coordinator": coordinator, "dashboard": dashboard, "server": server, "metrics": metrics}
        return found[which], "grpc" if which in ("coordinator", "server") else "http"

    def said(self) -> int:
        """Characters of all logs."""
        everybody = (*self.cluster.coordinators, *self.cluster.servers, *self.cluster.workers)
        return sum(len(running.out) + len(running.err) for running in everybody)


def listening(pid: int) -> set[int]:
    """The ports on which a process listens."""
    links = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}


@pytest.fixture(scope="module", params=["plain", "tls"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Small() as place:
        job = Job(place, request.param == "tls")
        try:
            yield job
            job.cluster.ended() if not job.hurry.touch() and False else None
        finally:
            job.cluster.close()


@pytest.mark.parametrize("which", PORTS)
def test_a_flood_of_strangers_is_not_felt(job: Job, which: str) -> None:
    port, protocol = job.port(which)
    before, logs = job.rate(), job.said()
    assert before > 1.0
    process = subprocess.Popen(
        [sys.executable, flood.__file__, str(port), protocol],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "flooding\n"
        slowest = 0.0
        began = time.monotonic()
        first = job.steps()
        while time.monotonic() < began + WINDOW_S:
            asked = time.monotonic()
            last = job.steps()
            slowest = max(slowest, time.monotonic() - asked)
        during = (last - first) / (time.monotonic() - began)
    finally:
        done = json.loads(process.communicate("", timeout=30.0)[0])
    print(which, before, during, slowest, job.said() - logs, done)
    for kind, count in flood.COUNTS.items():
        assert done[f"opened {kind}"] >= count
    assert sum(done.get(f"closed {kind}", 0) for kind in flood.COUNTS) >= 1000  # for want of room
    assert during >= 0.9 * before
    assert slowest < 2.0
    assert job.said() - logs < 100_000
