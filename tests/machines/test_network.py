"""The machines themselves: faults do what they say, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.integration.harness import ROOT, until
from tests.support.machines.cluster import HEAD, SERVERS, WORKERS
from tests.support.machines.guard import namespaces
from tests.support.machines.network import PREFIX, Cut, Network

GONE_S = 20.0
_OTHER = """
import subprocess, sys, time
from pathlib import Path
from tests.support.machines.network import Network
network = Network(["one"])
network.start()
subprocess.Popen(network.inside("one", "sleep", "600"), start_new_session=True)
network.takes_along(Path(sys.argv[1]))
print(*network.namespaces, network.guard_pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", list(Cut), ids=[how.value for how in Cut])
def test_a_machine_that_is_cut_off_hears_nothing_until_it_is_healed(network: Network, how: Cut) -> None:
    lone, other = WORKERS[0], SERVERS[0]
    assert network.reaches(HEAD, lone)
    network.cut(lone, how)
    try:
        before = network.traffic(lone)
        assert not network.reaches(HEAD, lone)
        assert not network.reaches(lone, HEAD)
        assert network.reaches(HEAD, other)
        after = network.traffic(lone)
        assert after.received == before.received
        assert (after.sent > before.sent) is (how is Cut.SILENT)
    finally:
        network.heal(lone)
    until("it is healed", lambda: network.reaches(HEAD, lone), GONE_S)


def test_the_machines_reach_nobody_else_and_have_no_way_out(network: Network) -> None:
    """Every machine has one cable and knows one subnet; the host has no address in it."""
    for machine in network.addresses:
        routes = subprocess.run(network.inside(machine, "ip", "route"), capture_output=True, text=True, check=True)
        assert [line.split()[0] for line in routes.stdout.splitlines()] == ["10.213.77.0/24"]
    own = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True)
    assert "10.213.77." not in own.stdout


def _another(directory: Path) -> tuple[subprocess.Popen[str], list[str], int]:
    """A process with a network of its own: the process, the namespaces, the pid of the guard."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(directory)], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    with process.stdout as out:
        *names, guard = out.readline().split()
    assert len(names) == 2, names
    assert set(names) <= set(namespaces())
    assert all(name.startswith(PREFIX) for name in names)
    return process, names, int(guard)


def test_a_test_that_is_killed_leaves_nothing_behind(network: Network, tmp_path: Path) -> None:
    (tmp_path / "its").mkdir()
    process, names, _ = _another(tmp_path / "its")
    process.kill()
    process.wait(GONE_S)
    until("its machines are gone", lambda: not set(names) & set(namespaces()), GONE_S)
    until("its directory is gone", lambda: not (tmp_path / "its").exists(), GONE_S)
    assert set(network.namespaces) <= set(namespaces())


def test_what_even_the_guard_could_not_remove_goes_with_the_next_start(network: Network, tmp_path: Path) -> None:
    process, names, guard = _another(tmp_path)
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait(GONE_S)
    assert set(names) <= set(namespaces())
    with Network(["two"]) as other:
        assert not set(names) & set(namespaces())
        assert {*other.namespaces, *network.namespaces} <= set(namespaces())
