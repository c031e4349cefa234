"""Machines that are network namespaces, joined by a switch in another one. Nothing of it touches the host's network.

Addresses, cables and the switch exist only inside the namespaces, so that many such networks may use the same ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from types import TracebackType

from paramserver.processes.alive import process_birth
from tests.support.machines.guard import PATIENCE_S, namespaces, pids, remove, run

GUARD = Path(__file__).with_name("guard.py")

# Of every namespace; then come the pid of the process that made it, its birth, and a name.
PREFIX = "psm"
_SUBNET = "10.213.77"
# Nobody in the network has this one: no route to host.
NOBODY = f"{_SUBNET}.250"
# What is sent there is never answered, as behind a firewall.
BLACK_HOLE = f"{_SUBNET}.251"
_SWITCH = "switch"
_CARD = "eth0"
_TOOLS = ("ip", "tc", "bridge")
_COMMAND_S = 20.0
_GONE_S = 20.0
_numbers = count()


class Cut(Enum):
    """How a machine is taken off the network.

    PULLED: its card is down, so that it is told "network is unreachable". SILENT: the switch drops all of its packets,
    and nobody is told anything.
    """

    PULLED = "pulled"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Packets and bytes since the start, as the switch sees them: sent by a machine, and sent on to it."""

    sent: int
    received: int
    bytes_sent: int
    bytes_received: int


class Network:
    """Some machines; made by `start`, removed by `close`, by a small process even if this one is killed."""

    def __init__(self, machines: Sequence[str]) -> None:
        birth = process_birth(os.getpid())
        self._tag = f"{PREFIX}-{os.getpid()}-{birth}-{next(_numbers)}"
        self.addresses = {name: f"{_SUBNET}.{number}" for number, name in enumerate(machines, 1)}
        self._guard: subprocess.Popen[bytes] | None = None
        # What each link carries, in Mb/s, once it is limited.
        self.megabits = 1000.0

    def __enter__(self) -> Network:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def namespace(self, machine: str) -> str:
        """The name of its namespace."""
        return f"{self._tag}-{machine}"

    @property
    def namespaces(self) -> list[str]:
        """All of them."""
        return [self.namespace(name) for name in (*self.addresses, _SWITCH)]

    def inside(self, machine: str, *argv: str) -> list[str]:
        """The command that runs this one on a machine; it keeps the pid."""
        return ["ip", "netns", "exec", self.namespace(machine), *argv]

    @property
    def guard_pid(self) -> int:
        """The process that removes the machines when this one has ended."""
        assert self._guard is not None
        return self._guard.pid

    # ---- making and removing it

    def start(self) -> None:
        """Make it, without traffic limits. Also removes what killed tests have left behind."""
        check_tools()
        remove_stale()
        self._guard = _guard(self.namespaces)
        for namespace in self.namespaces:
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        switch = self.namespace(_SWITCH)
        self._in(_SWITCH, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for name, address in self.addresses.items():
            own = self.namespace(name)
            self._in(name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
            port = ("type", "veth", "peer", "name", name, "netns", switch)
            run("ip", "link", "add", "name", _CARD, "netns", own, *port)
            run("ip", "-n", own, "addr", "add", f"{address}/24", "dev", _CARD)
            run("ip", "-n", own, "link", "set", _CARD, "up")
            run("ip", "-n", own, "neigh", "add", BLACK_HOLE, "lladdr", "02:00:00:00:00:fb", "dev", _CARD)
            run("ip", "-n", switch, "link", "set", "dev", name, "master", "br0", "up")

    def close(self) -> None:
        """Kill what runs on the machines and remove them. May be repeated."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait(_GONE_S)
        assert not set(self.namespaces) & set(namespaces()), "the machines are still there"

    def takes_along(self, directory: Path) -> None:
        """This directory is removed with it."""
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{directory}\n".encode())
        self._guard.stdin.flush()

    def pids(self, machine: str) -> list[int]:
        """The processes on a machine."""
        return pids(self.namespace(machine))

    # ---- faults

    def cut(self, machine: str, how: Cut) -> None:
        """Take a machine off the network; the processes on it go on."""
        if how is Cut.PULLED:
            run("ip", "-n", self.namespace(machine), "link", "set", _CARD, "down")
        else:
            self._in(_SWITCH, "bridge", "link", "set", "dev", machine, "state", "disabled")

    def heal(self, machine: str) -> None:
        """Undo whatever `cut` has done."""
        run("ip", "-n", self.namespace(machine), "link", "set", _CARD, "up")
        deadline = time.monotonic() + PATIENCE_S
        while not self._carries(machine):  # the kernel tells the switch a moment later
            assert time.monotonic() < deadline, f"the cable of {machine} does not carry anything"
            time.sleep(0.01)
        self._in(_SWITCH, "bridge", "link", "set", "dev", machine, "state", "forwarding")

    def _carries(self, machine: str) -> bool:
        show = run("ip", "-n", self.namespace(_SWITCH), "-j", "link", "show", "dev", machine)
        return bool(json.loads(show)[0]["operstate"] == "UP")

    def traffic(self, machine: str) -> Traffic:
        """Packets and bytes of a machine so far."""
        found = json.loads(run("ip", "-n", self.namespace(_SWITCH), "-j", "-s", "link", "show", "dev", machine))[0][
            "stats64"
        ]
        came, went = found["rx"], found["tx"]
        return Traffic(came["packets"], went["packets"], came["bytes"], went["bytes"])

    def limit(self, megabits: float, queue_kilobytes: int = 512) -> None:
        """From now on every cable carries this much per second, in each direction; so much may wait at either end."""
        self.megabits = megabits
        for name in self.addresses:
            self.limit_one(name, megabits, queue_kilobytes)

    def limit_one(self, machine: str, megabits: float, queue_kilobytes: int = 512) -> None:
        """From now on the cable of this machine carries so much."""
        shape = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "limit", f"{queue_kilobytes}kb"]
        self._in(machine, "tc", "qdisc", "replace", "dev", _CARD, "root", *shape)
        self._in(_SWITCH, "tc", "qdisc", "replace", "dev", machine, "root", *shape)

    def unlimit(self) -> None:
        """Take the limit away."""
        for name in self.addresses:
            self.unlimit_one(name)

    def unlimit_one(self, machine: str) -> None:
        """Take the limit of this machine away."""
        self._in(machine, "tc", "qdisc", "del", "dev", _CARD, "root")
        self._in(_SWITCH, "tc", "qdisc", "del", "dev", machine, "root")

    def delayed_by_limit(self) -> int:
        """How many packets had to wait for the limit so far."""
        found = [json.loads(self._in(name, "tc", "-j", "-s", "qdisc", "show", "dev", _CARD)) for name in self.addresses]
        return sum(one["overlimits"] for shapes in found for one in shapes if one["kind"] == "tbf")

    # ---- traffic of our own

    def reaches(self, source: str, target: str, timeout_s: float = 1.0) -> bool:
        """Whether a packet gets from one machine to another, and the answer back; nobody has to listen there."""
        words = [sys.executable, "-I", "-S", "-c", _KNOCK, self.addresses[target], str(timeout_s)]
        return subprocess.run(self.inside(source, *words), timeout=_COMMAND_S).returncode == 0

    def megabits_per_s(self, source: str, target: str, megabytes: int) -> float:
        """How fast this much travels from one machine to another."""
        here = [sys.executable, "-I", "-S", "-c"]
        with subprocess.Popen(self.inside(target, *here, _SINK), stdout=subprocess.PIPE, text=True) as sink:
            try:
                assert sink.stdout is not None
                port = sink.stdout.readline().strip()
                run(*self.inside(source, *here, _SOURCE, self.addresses[target], port, str(megabytes)))
                return float(sink.stdout.readline()) / 1e6
            finally:
                sink.kill()

    def _in(self, machine: str, *argv: str) -> str:
        return run(*self.inside(machine, *argv))


# Port 1 is closed: whoever hears "connection refused" has reached the machine.
_KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 1), float(sys.argv[2]))
except ConnectionRefusedError:
    sys.exit(0)
except OSError:
    sys.exit(1)
"""
_SINK = """
import socket, time
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    got, start = len(peer.recv(1)), time.monotonic()
    while data := peer.recv(1 << 20):
        got += len(data)
    print(8 * got / (time.monotonic() - start), flush=True)
"""
_SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10.0) as peer:
    peer.sendall(bytes(int(sys.argv[3]) << 20))
"""


def check_tools() -> None:
    """Fails, with words, where such networks cannot be made."""
    assert os.geteuid() == 0, "the emulated machines are network namespaces: run this as root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    assert not missing, f"the emulated machines need {', '.join(missing)}: install iproute2"


def remove_stale() -> None:
    """Remove the machines of tests that are gone."""
    for name in namespaces():
        words = name.split("-")
        if words[0] == PREFIX and len(words) >= 4 and process_birth(int(words[1])) != int(words[2]):
            remove(name)


def _guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Removes these namespaces as soon as its input ends, which it does when this process ends, however it ends."""
    return subprocess.Popen([sys.executable, "-I", "-S", str(GUARD), *names], stdin=subprocess.PIPE, process_group=0)
