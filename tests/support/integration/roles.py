"""Roles started one by one, as on separate machines, but on this one; and a store of their own that can die."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import fetch_status
from paramserver.machine.valkey import EmbeddedStore
from tests.support.integration.harness import SCRIPTS, Done, Place, Running, read_summary, until

TRAIN = SCRIPTS / "train.py"
# Short, so that tests of what comes after it are.
LEASE_S = 2.0
# How long a job may still take when nothing stands in its way any more.
END_S = 60.0
_WHERE = r"(?:coordinator of job \S+|standing by) at ([0-9.]+:[0-9]+)"


class Cluster:
    """One job. ``environ`` goes to all its processes."""

    def __init__(
        self, place: Place, job: str = "roles", environ: Mapping[str, str] | None = None, url: str = ""
    ) -> None:
        self.place = place
        self.job = job
        self.environ = {
            "PARAMSERVER_CLUSTER__LEASE_S": str(LEASE_S),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        self.store = EmbeddedStore()
        self.store_directory = place.work / "store"
        self.url = url or self.store.start(self.store_directory)
        self.addresses: list[str] = []
        self.coordinators: list[Running] = []
        self.servers: list[Running] = []
        self.workers: list[Running] = []

    def beside(self, job: str) -> Cluster:
        """Another job on the same store."""
        return Cluster(self.place, job, self.environ, self.url)

    def coordinator(self, *flags: str | Path, wait: bool = True) -> Running:
        """Start one more coordinator, on a free port; returns when it leads or stands by."""
        running = self.place.launch(
            *("start", "coordinator", "--listen", "127.0.0.1:0", "--job", self.job, "--store", self.url),
            *flags,
            environ=self.environ,
        )
        self.coordinators.append(running)
        if wait:
            running.wait_for(_WHERE)
            found = re.search(_WHERE, running.out)
            assert found is not None
            self.addresses.append(found[1])
        return running

    @property
    def join(self) -> str:
        """What the others are told of the coordinators."""
        return ",".join(self.addresses)

    def server(self, *flags: str | Path) -> Running:
        """Start one more server."""
        running = self.place.launch("start", "server", "--join", self.join, *flags, environ=self.environ)
        self.servers.append(running)
        return running

    def worker(self, *script: str | Path, flags: tuple[str | Path, ...] = ()) -> Running:
        """Start one more worker."""
        running = self.place.launch(
            "start", "worker", "--join", self.join, *flags, "--", TRAIN, *script, environ=self.environ
        )
        self.workers.append(running)
        return running

    def status(self) -> dict[str, Any]:
        """The facts of `paramserver status --json`, without a process that asks for them."""
        return describe(fetch_status(self.join, security=self.place.security(self.addresses[0])))

    def until_status(self, what: str, holds: Any, deadline_s: float = 60.0) -> dict[str, Any]:
        """Ask until the status is as wanted."""
        found: dict[str, Any] = {}

        def ask() -> bool:
            found.clear()
            found.update(self.status())
            return bool(holds(found))

        until(what, ask, deadline_s)
        return found

    def ended(self) -> list[Done]:
        """All processes that are not known to be dead have ended well."""
        everybody = (*self.workers, *self.servers, *self.coordinators)
        try:
            return [running.wait(END_S).check() for running in everybody]
        except AssertionError as error:
            said = "\n".join(f"=== {running.pid}\n{running.out}\n{running.err}" for running in everybody)
            raise AssertionError(f"{error}\n{said}") from None

    def store_text(self) -> str:
        """All files of the store, as text."""
        files = [path for path in self.store_directory.rglob("*") if path.is_file()]
        assert files
        return "".join(path.read_bytes().decode("latin-1") for path in files)

    def close(self) -> None:
        """The processes are the place's to end; the store is ours."""
        self.store.stop()


def cluster_fixture(**options: Any) -> Iterator[Cluster]:
    """The body of a fixture that gives a cluster."""
    with Place() as place:
        cluster = Cluster(place, **options)
        try:
            yield cluster
        finally:
            cluster.close()


def kill(running: Running) -> None:
    """kill -9, and the proof that it worked."""
    running.send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL


def reference(place: Place, *script: str | Path) -> dict[str, Any]:
    """The summary of the same training by the script alone, in steps of four slices, without any fault."""
    summary = place.work / "reference.json"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(summary), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
    place.python(TRAIN, *script, environ=environ).check()
    return read_summary(summary)


def same_result(summary: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bit for bit, and sample for sample."""
    keys = ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "samples", "contributions_applied")
    assert {key: summary[key] for key in keys} == {key: wanted[key] for key in keys}


def alive(pid: int) -> bool:
    """Whether such a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
