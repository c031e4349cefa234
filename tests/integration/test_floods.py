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

from paramserver import errors
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
ANSWER_S = 2.0
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
        # A busy machine may keep a process waiting for some seconds.
        self.cluster = Cluster(place, environ={"PARAMSERVER_CLUSTER__LEASE_S": "10"})
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
        try:
            until("steps", lambda: self.steps() > 20, 100.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said}") from None

    @property
    def said(self) -> str:
        """All logs."""
        everybody = (*self.cluster.coordinators, *self.cluster.servers, *self.cluster.workers)
        return "\n".join(running.out + running.err for running in everybody)

    def status(self) -> dict[str, Any]:
        """As a newcomer hears it, over a connection of its own. It tries again, as members do."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                return describe(fetch_status(self.cluster.join, ANSWER_S, self.security))
            except errors.UnavailableError:
                if time.monotonic() > deadline:
                    raise

    def steps(self) -> int:
        """Steps that the server has done."""
        return max((int(p["version"] or 0) for p in self.status()["processes"] if p["role"] == "server"), default=-1)

    def over_a_while(self) -> tuple[float, float]:
        """Steps per second over a while, and the longest time for a status."""
        first, began, slowest = self.steps(), time.monotonic(), 0.0
        while (now := time.monotonic()) < began + WINDOW_S:
            last = self.steps()
            slowest = max(slowest, time.monotonic() - now)
        assert min(first, last) >= 0, f"the server was lost\n{self.said}"
        return (last - first) / (now - began), slowest

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
        finally:
            job.cluster.close()


@pytest.mark.parametrize("which", PORTS)
def test_a_flood_of_strangers_is_not_felt(job: Job, which: str) -> None:
    port, protocol = job.port(which)
    (before, _), logs = job.over_a_while(), len(job.said)
    with subprocess.Popen(
        [sys.executable, flood.__file__, str(port), protocol],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        during, slowest = job.over_a_while()
        done = json.loads(process.communicate("", timeout=30.0)[0])
    print(which, before, during, slowest, len(job.said) - logs, done)
    for kind, count in flood.COUNTS.items():
        assert done[f"opened {kind}"] >= count
    assert sum(done.get(f"closed {kind}", 0) for kind in flood.COUNTS) >= 1000  # for want of room
    assert "this one gave way" in job.said
    assert during >= 0.9 * before > 0
    assert slowest < ANSWER_S
    assert len(job.said) - logs < 100_000
