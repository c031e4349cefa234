"""Runs on emulated hosts: a cluster, or gloo, in network namespaces with links of a rate. Needs root and iproute2."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.launch import SCRIPTS, environment
from tests.support.machines.network import Network

SCRIPT = SCRIPTS / "ready.py"
HEAD = "head"
_PORT = 8790
_RUN_S = 300.0


def names(workers: int, servers: int) -> list[str]:
    """One host for the coordinator, one for each worker and server."""
    return [HEAD, *(f"w{i}" for i in range(workers)), *(f"s{i}" for i in range(servers))]


@contextmanager
def network(workers: int, servers: int, megabits: float, queue_kilobytes: int = 512) -> Iterator[Network]:
    """The hosts, with links of this rate, and equal queues before them. Raises RuntimeError if they cannot be made."""
    try:
        with Network(names(workers, servers)) as made:
            for name in made.addresses:
                _without_pacing(made, name)
            made.limit(megabits, queue_kilobytes)
            yield made
    except AssertionError as error:
        raise RuntimeError(str(error)) from error


def _without_pacing(network: Network, host: str) -> None:
    """TCP without "bbr", which paces itself and so hides losses of a full switch. Unchanged if this is forbidden."""
    for name in ("cubic", "reno"):
        command = network.inside(host, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={name}")
        if subprocess.run(command, timeout=20.0, stderr=subprocess.DEVNULL).returncode == 0:
            return


def congestion_control(network: Network) -> str:
    """The congestion control of TCP there."""
    return _read(network, HEAD, "/proc/sys/net/ipv4/tcp_congestion_control").strip()


def _read(network: Network, host: str, path: str) -> str:
    command = network.inside(host, "cat", path)
    return subprocess.run(command, check=True, timeout=20.0, capture_output=True, text=True).stdout


def retransmitted(network: Network) -> int:
    """Segments that TCP has sent again so far, on all hosts."""
    total = 0
    for host in network.addresses:
        said = _read(network, host, "/proc/net/snmp")
        keys, numbers = (line.split() for line in said.splitlines() if line.startswith("Tcp:"))
        total += int(numbers[keys.index("RetransSegs")])
    return total


def sent_bytes(network: Network, host: str) -> int:
    """Bytes that the interface has sent so far."""
    cards = (line.split(":") for line in _read(network, host, "/proc/net/dev").splitlines() if ":" in line)
    return sum(int(numbers.split()[8]) for name, numbers in cards if name.strip() != "lo")


def cluster(
    network: Network,
    workers: int,
    servers: int,
    words: Sequence[str],
    beside: bool = False,
    script: Path = SCRIPT,
    settings: Mapping[str, str] | None = None,
    per_host: int = 1,
) -> dict[str, Any]:
    """Train a script on a cluster. Returns the facts of its rank 0. Raises RuntimeError if a process fails.

    ``beside``: with one more server beside each worker. ``settings``: of the job, by dotted name. ``per_host``: the
    number of workers of a host, which meet in a directory of the host.
    """
    known = {"cluster.link_mbps": f"{network.megabits:g}", **(settings or {})}
    environ = {f"PARAMSERVER_{key.upper().replace('.', '__')}": value for key, value in known.items()}
    at = f"{network.addresses[HEAD]}:{_PORT}"
    flags = ("--insecure", "--listen", at, "--store", "memory", "--checkpoint-dir", "none")
    sizes = ("--servers", str(servers + beside * workers), "--workers", str(workers), "--job", "ready")
    with _Job() as job:
        job.start(network, HEAD, "-m", "paramserver", "start", "coordinator", *flags, *sizes, environ=environ)
        for i in range(servers):
            serve = ("-m", "paramserver", "start", "server", "--join", at, "--insecure")
            job.start(network, f"s{i}", *serve, environ=environ)
        for i in range(workers):
            ours = (*("--with-server",) * beside, "--", str(script), *words, "--out", str(job.out))
            host = f"w{i // per_host}"
            call = ("-m", "paramserver", "start", "worker", "--join", at, "--insecure", *ours)
            job.start(network, host, *call, environ=environ, name=f"{host}-{i % per_host}")
        return job.finish()


def ring(
    network: Network, workers: int, words: Sequence[str], script: Path = SCRIPT, how: str = "--ring"
) -> dict[str, Any]:
    """The same with gloo's all_reduce on the workers' hosts; ``how`` tells the script to do so."""
    with _Job() as job:
        for i in range(workers):
            where = {
                "MASTER_ADDR": network.addresses["w0"],
                "MASTER_PORT": "29500",
                "RANK": str(i),
                "WORLD_SIZE": str(workers),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            job.start(network, f"w{i}", str(script), how, *words, "--out", str(job.out), environ=where)
        return job.finish()


def sockets(network: Network, workers: int, servers: int, megabytes: int, steps: int) -> dict[str, Any]:
    """As many bytes both ways over bare TCP, a connection from each worker to each server."""
    words = ("--bytes", str(round(megabytes * 1e6 / servers)), "--steps", str(steps))
    addresses = [network.addresses[f"s{i}"] for i in range(servers)]
    with _Job() as job:
        for i, address in enumerate(addresses):
            call = ("--listen", address, "--connections", str(workers), *words)
            job.start(network, f"s{i}", str(SCRIPTS / "sockets.py"), *call)
        for i in range(workers):
            out = ("--out", str(job.out)) if i == 0 else ()
            job.start(network, f"w{i}", str(SCRIPTS / "sockets.py"), "--servers", ",".join(addresses), *words, *out)
        return job.finish()


class _Job:
    """Processes on hosts that end together."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.out = self._directory / "out.json"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._stack.close()

    def start(
        self, network: Network, host: str, *words: str, environ: dict[str, str] | None = None, name: str = ""
    ) -> None:
        """Run Python there. ``name``: of the process, if it is not the only one of the host."""
        name = name or host
        runtime, meeting = self._directory / f"run-{name}", self._directory / f"meet-{host}"
        runtime.mkdir(mode=0o700)
        meeting.mkdir(mode=0o700, exist_ok=True)
        # The hosts share the memory of this machine, which real hosts do not.
        apart = {"PARAMSERVER_CLUSTER__TRANSPORT": "bulk", "PARAMSERVER_CLUSTER__HOST_TIER": "off"}
        apart["PARAMSERVER_CLUSTER__MEETING_DIR"] = str(meeting)
        own = {"PARAMSERVER_INTERNAL_RUNTIME_DIR": str(runtime), **apart, **(environ or {})}
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                network.inside(host, sys.executable, *words),
                env={**environment(), **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> dict[str, Any]:
        """The facts that rank 0 wrote, once all ranks have ended well."""
        deadline = time.monotonic() + _RUN_S
        for host, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                said = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in self._directory.glob("*.log"))
                raise RuntimeError(f"the process on {host} ended with {code}:\n{said}")
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found
