"""The commands of docs/deploy.md, literally: on machines a, b and c, with everything that its table says may die.

ssh and scp are small scripts here, since nobody listens for them on the emulated machines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import DIGITS, Done, Place, Running, read_summary, until
from tests.support.machines.cluster import PACED, PATIENCE_S, digests
from tests.support.machines.network import Cut, Network
from tests.support.machines.page import examples, rows

pytestmark = pytest.mark.timeout(900.0)

MACHINES = ("a", "b", "c")
SSH = '#!/bin/bash\ncd "$ROOT/$1" && shift && exec "$@"\n'
SCP = '#!/bin/bash\nshift\nto=${!#}\nexec cp -p "${@:1:$#-1}" "$ROOT/${to%%:*}/${to#*:}"\n'
ENTER = 'mount --bind "$ROOT/hosts" /etc/hosts && mount --bind "$ROOT/shared" /mnt && exec bash -c "$1"'


class Site:
    """Three machines, each with a home directory; they share /mnt."""

    def __init__(self, network: Network, place: Place) -> None:
        self.network = network
        self.place = place
        network.takes_along(place.root)
        self._root = place.root / "site"
        for name in (*MACHINES, "shared", "bin"):
            (self._root / name).mkdir(parents=True)
        for name, text in (("ssh", SSH), ("scp", SCP)):
            (self._root / "bin" / name).write_text(text)
            (self._root / "bin" / name).chmod(0o700)
        hosts = [f"{network.addresses[machine]} {machine}" for machine in MACHINES]
        (self._root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        for machine in MACHINES:  # the script of the page, slow until told to hurry
            (self._root / machine / "workers").mkdir()
            (self._root / machine / "workers" / "digits.py").symlink_to(PACED)

    def home(self, machine: str) -> Path:
        """Where commands on this machine are typed."""
        return self._root / machine

    def type(self, machine: str, line: str) -> Running:
        """Type a line on a machine."""
        environ = {
            "ROOT": str(self._root),
            "PATH": f"{self._root / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self._root / machine / "state"),
            "PARAMSERVER_INTERNAL_RUNTIME_DIR": str(self._root / machine / "run"),
            # They share the memory of this host, which real machines do not.
            "PARAMSERVER_CLUSTER__TRANSPORT": "grpc",
            "MACHINES_HURRY": str(self._root / "hurry"),
            "MACHINES_PACE_S": "3.0",
        }
        words = self.network.inside(machine, "bash", "-c", ENTER, "bash", line)
        return self.place.start(*words, cwd=self.home(machine), environ=environ)

    def hurry(self, yes: bool = True) -> None:
        """From now on the workers go as fast as they can, or slowly."""
        (self._root / "hurry").touch() if yes else (self._root / "hurry").unlink(missing_ok=True)

    def forget(self) -> None:
        """The jobs so far leave nothing behind."""
        for place in (self._root / "shared" / "checkpoints", *(self._root / name / "state" for name in MACHINES)):
            shutil.rmtree(place, ignore_errors=True)

    def off(self, machine: str) -> None:
        """Switch a machine off."""
        for pid in self.network.pids(machine):
            os.kill(pid, signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        """Asked on machine a; empty if no coordinator answers there."""
        done = self.type("a", "paramserver status --json").wait(PATIENCE_S)
        facts: dict[str, Any] = json.loads(done.out) if done.code == 0 else {}
        return facts

    def when(self, what: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status of which it is true."""
        found: dict[str, Any] = {}

        def ask() -> bool:
            nonlocal found
            found = self.status()
            return bool(found) and true(found)

        try:
            until(what, ask, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlast status: {found}") from None
        return found


@pytest.fixture(scope="module")
def machines() -> Iterator[Site]:
    with Network(MACHINES) as network, Place() as place:
        site = Site(network, place)
        init, copy = examples("Certificates first")
        for example in (init, copy):
            site.type("a", example).wait().check()
        yield site


@pytest.fixture
def site(machines: Site) -> Iterator[Site]:
    """The machines, on which nothing runs yet."""
    yield machines
    for machine in MACHINES:
        machines.off(machine)
        until("it is off", lambda machine=machine: not machines.network.pids(machine), 10.0)  # type: ignore[misc]
    machines.forget()


def trains(facts: dict[str, Any]) -> bool:
    """Two servers and two workers take part."""
    present = [p["state"] for p in facts["processes"] if not p["gone"]]
    return facts["state"] == "training" and present == ["training"] * 5


def by_hand() -> tuple[str, str, list[str], str]:
    """The examples of the section: doctor, the coordinator, a server and a worker, commands for a running job."""
    doctor, coordinator, members, commands = examples("By hand")
    return doctor, coordinator, members.splitlines(), commands


def everybody(site: Site, coordinator: str, members: list[str]) -> dict[str, Running]:
    """The processes of the job, by machine and role. The workers of b and of c come one after the other."""
    site.hurry(False)
    started = {"coordinator": site.type("a", coordinator)}
    started["coordinator"].wait_for("coordinator of job")
    for machine in ("b", "c"):
        for role, line in zip(("server", "worker"), members, strict=True):
            started[f"{role} on {machine}"] = site.type(machine, line)
    return started


def ends(started: dict[str, Running]) -> dict[str, Done]:
    """All end well."""
    return {name: running.wait(PATIENCE_S).check() for name, running in started.items()}


def story(started: dict[str, Running]) -> str:
    return "\n".join(f"=== {name}\n{running.out}{running.err}" for name, running in started.items())


def test_by_hand(site: Site) -> None:
    doctor, coordinator, members, commands = by_hand()
    for machine in MACHINES:
        site.type(machine, doctor).wait().check()
    started = everybody(site, coordinator, members)
    try:
        status, mode, drain, stop = commands.splitlines()
        site.when("it trains", trains)
        assert "worker-1" in site.type("a", status).wait(PATIENCE_S).check().out
        for line in (mode, drain, stop):
            site.type("a", line).wait().check()
        ends(started)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(started)}") from None


def test_what_dies_what_happens_what_you_do(site: Site) -> None:
    with Place() as place:
        site.network.takes_along(place.root)
        summary = place.work / "summary.json"
        counts = ("--servers", "2", "--workers", "2", "--summary", summary)
        place.paramserver("run", DIGITS, *counts, "--", "--epochs", "5").check()
        quiet = read_summary(summary)
    _, coordinator, members, _ = by_hand()
    started = everybody(site, coordinator, members)
    try:
        Table(site, started, rows()).play()
        site.hurry()
        ends(started)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(started)}") from None
    assert digests(read_summary(site.home("a") / "summary.json")) == digests(quiet)


class Table:
    """Lets one row after the other happen to a job. ``started``: its processes that are not known to be dead."""

    def __init__(self, site: Site, started: dict[str, Running], table: dict[str, list[str]]) -> None:
        self.site = site
        self.started = started
        self.table = table

    def play(self) -> None:
        """All rows; each command of the table is typed."""
        self.site.when("it trains", trains)
        self.process_dies("worker", self.table.pop("a worker"))
        again_server = self.table.pop("a server")
        self.process_dies("server", again_server)
        back = self.table.pop("machine `b`")
        self.machine_dies("b", back)
        assert self.table.pop("the network of `b`") == []
        self.network_fails("b")
        assert self.table.pop("both servers, one before the other is replaced") == []
        self.both_servers_die(again_server)
        (again,) = self.table.pop("the coordinator")
        term = self.site.status()["term"]
        self.started.pop("coordinator").kill()
        self.started["coordinator"] = self.site.type("a", again)
        self.site.when("the next term", lambda facts: facts["term"] == term + 1 and trains(facts))
        assert self.table.pop("all machines") == []
        self.all_die(again, back)
        (left,) = self.table.items()
        assert left[0].startswith("a server of a job without checkpoints and without replicas")
        assert left[1] == []

    def pid(self, role: str, machine: str) -> int:
        """Of the process of this role on a machine, by `status`."""
        host = self.site.network.addresses[machine]
        processes = self.site.when("it trains", trains)["processes"]
        here = [p for p in processes if p["role"] == role and not p["gone"]]
        (found,) = [p["pid"] for p in here if p["address"].partition(":")[0] == host]
        return int(found)

    def rollbacks(self) -> int:
        """How often the job went back."""
        return int(self.site.when("it trains", trains)["rollbacks"])

    def process_dies(self, role: str, lines: list[str]) -> None:
        """The process that is watched, then one that nobody watches."""
        before, pid = self.rollbacks(), self.pid(role, "b")
        os.kill(pid, signal.SIGKILL)
        self.site.when("it is started again", lambda facts: trains(facts) and self.pid(role, "b") != pid)
        assert self.rollbacks() == before, "no step is done again"
        self.started.pop(f"{role} on c").kill()
        facts = self.site.when("it is missed", lambda facts: facts["state"] == "degraded" and bool(facts["lost"]))
        assert f"{facts['lost'][0]}" in facts["reason"]
        (line,) = lines
        self.started[f"{role} on c"] = self.site.type("c", line)
        self.site.when("it has a successor", lambda facts: trains(facts) and not facts["lost"])
        assert self.rollbacks() == before, "no step is done again"

    def both_servers_die(self, lines: list[str]) -> None:
        """The one that is watched, and the one that nobody watches."""
        before, watched = self.rollbacks(), self.pid("server", "b")
        os.kill(watched, signal.SIGKILL)
        self.started.pop("server on c").kill()
        (line,) = lines
        self.started["server on c"] = self.site.type("c", line)
        self.site.when("the job went back", lambda facts: trains(facts) and facts["rollbacks"] > before)

    def machine_dies(self, machine: str, lines: list[str]) -> None:
        """A server and a worker at once, and those that watch them."""
        before = self.rollbacks()
        self.site.off(machine)
        for role in ("server", "worker"):
            self.started.pop(f"{role} on {machine}").wait(PATIENCE_S)
        self.site.when("both are missed", lambda facts: len(facts["lost"]) == 2)
        for role, line in zip(("server", "worker"), lines, strict=True):
            self.started[f"{role} on {machine}"] = self.site.type(machine, line)
        self.site.when("they have successors", lambda facts: trains(facts) and not facts["lost"])
        assert self.rollbacks() == before, "no step is done again"

    def network_fails(self, machine: str) -> None:
        """For longer than the lease."""
        before = self.rollbacks()
        self.site.network.cut(machine, Cut.SILENT)
        self.site.when("both are missed", lambda facts: len(facts["lost"]) == 2)
        self.site.network.heal(machine)
        self.site.when("both are back", lambda facts: trains(facts) and not facts["lost"])
        assert self.rollbacks() == before, "no step is done again"

    def all_die(self, coordinator: str, members: list[str]) -> None:
        """A power cut."""
        before, term = self.rollbacks(), self.site.status()["term"]
        for machine in MACHINES:
            self.site.off(machine)
        for name in list(self.started):
            self.started.pop(name).wait(PATIENCE_S)
        self.started["coordinator"] = self.site.type("a", coordinator)
        for machine in ("b", "c"):
            for role, line in zip(("server", "worker"), members, strict=True):
                self.started[f"{role} on {machine}"] = self.site.type(machine, line)
        self.site.when("all train again", lambda facts: facts["term"] > term and trains(facts))
        assert self.rollbacks() > before


def test_a_server_of_a_job_without_checkpoints(site: Site) -> None:
    _, coordinator, members, _ = by_hand()
    started = everybody(site, coordinator.replace("/mnt/checkpoints", "none --replicas 0"), members)
    try:
        facts = site.when("it trains", trains)
        host = site.network.addresses["b"]
        (pid,) = [p["pid"] for p in facts["processes"] if p["role"] == "server" and p["address"].startswith(host)]
        os.kill(pid, signal.SIGKILL)
        done = {name: running.wait(PATIENCE_S) for name, running in started.items()}
        assert done["coordinator"].check(1).said.count("that shard of the model is gone") >= 1
        assert done["server on b"].code == done["server on c"].code == 1
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(started)}") from None
