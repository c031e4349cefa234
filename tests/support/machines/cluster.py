"""A job on the machines: store, coordinator, servers and workers, each with the files that belong on its machine."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paramserver.machine.valkey import find_program
from paramserver.pki import certs
from tests.support.contract.redis_servers import PASSWORD, USER, user_line
from tests.support.integration.harness import DIGITS, Done, Place, Running, read_summary, until
from tests.support.machines.network import NOBODY, Network

HEAD = "head"
SERVERS = ("server-a", "server-b")
WORKERS = ("worker-a", "worker-b", "worker-c")
MACHINES = (HEAD, *SERVERS, *WORKERS)

PORT = 8790
STORE_PORT = 6379
EPOCHS = 6
SLICES = 43  # 1,347 digits in slices of 32
SLICES_PER_STEP = 6
STEPS = EPOCHS * 8  # 43 slices are seven steps of six, and one of a single slice
SEED = 5
LEASE_S = 3.0
# How long processes may take to start, to notice, to come back, on a busy machine.
PATIENCE_S = 90.0
TEST_S = 300.0

PACED = Path(__file__).resolve().parent / "paced.py"
# A proxy that nobody can reach; all processes are told to use it.
PROXIES = {
    name: f"http://{NOBODY}:3128"
    for word in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    for name in (word, word.upper())
}
_ROLE_FILES = {
    "coordinator": ("join.token", "admin.token"),
    "server": ("join.token",),
    "worker": ("join.token",),
    "admin": ("join.token", "admin.token"),
}
# Whoever shows this to others has given something away.
Secrets = list[str]


def trust(directory: Path, source: Path, role: str) -> Path:
    """A directory with what ``role`` needs of ``source``, and nothing else."""
    directory.mkdir(mode=0o700)
    for name in ("ca.crt", f"{role}.crt", f"{role}.key", *_ROLE_FILES[role]):
        shutil.copy2(source / name, directory / name)
    return directory


@dataclass(frozen=True, slots=True)
class Site:
    """What all jobs share: the network, certificates, and a store on the first machine."""

    network: Network
    place: Place
    certs: Path
    password_file: Path
    secrets: Secrets = field(repr=False)

    @classmethod
    def open(cls, network: Network, place: Place) -> Site:
        """Make certificates and a password, and start the store."""
        network.takes_along(place.root)
        home = place.root / "certs"
        place.paramserver("certs", "init", home, "--job", "digits").check()
        password_file = place.root / "store.password"
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_urlsafe(24))
        keys = [line for key in home.glob("*.key") for line in key.read_text().splitlines()[1:-1]]
        tokens = [(home / name).read_text().strip() for name in (certs.JOIN_TOKEN, certs.ADMIN_TOKEN)]
        site = cls(network, place, home, password_file, [password_file.read_text(), *tokens, *keys])
        site.start_store()
        return site

    @property
    def store(self) -> str:
        """Its address, without the password."""
        return f"redis://{USER}@{self.network.addresses[HEAD]}:{STORE_PORT}/0"

    def start_store(self) -> None:
        """Start the store of the job, with a password for its user."""
        directory = self.place.root / "store"
        directory.mkdir(mode=0o700)
        user = user_line().removeprefix("ACL SETUSER ").replace(PASSWORD, self.password_file.read_text())
        lines = [
            f"bind {self.network.addresses[HEAD]}",
            f"port {STORE_PORT}",
            f"dir {directory}",
            "appendonly yes",
            'save ""',
            "user default off",
            f"user {user}",
        ]
        configuration = directory / "store.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("\n".join([*lines, ""]))
        running = self.place.start(*self.network.inside(HEAD, str(find_program()), str(configuration)), cwd=directory)
        running.wait_for("Ready to accept connections", PATIENCE_S)

    def command(
        self, machine: str, *tokens: str | Path, role: str = "", environ: Mapping[str, str] | None = None
    ) -> Running:
        """Start a command of paramserver on a machine, where the runtime directory is one per ``role``."""
        home = self.place.root / machine
        runtime = home / f"run-{role}"
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = [sys.executable, "-m", "paramserver", *(str(token) for token in tokens)]
        more = {
            **PROXIES,
            "PARAMSERVER_INTERNAL_RUNTIME_DIR": str(runtime),
            # They share the memory of this host, which real machines do not.
            "PARAMSERVER_CLUSTER__TRANSPORT": "grpc",
            **(environ or {}),
        }
        return self.place.start(*self.network.inside(machine, *words), cwd=home, environ=more)

    def trust(self, machine: str, role: str) -> Path:
        """The directory with the certificate of ``role`` on a machine."""
        directory = self.place.root / machine / f"certs-{role}"
        if not directory.exists():
            directory.parent.mkdir(exist_ok=True)
            trust(directory, self.certs, role)
        return directory


class Cluster:
    """One job. ``settings``: more of the coordinator's, by dotted name. ``insecure``: without TLS and tokens."""

    def __init__(self, site: Site, settings: Mapping[str, object] | None = None, insecure: bool = False) -> None:
        self.site = site
        self.network = site.network
        self.job = f"job-{secrets.token_hex(4)}"
        # Where servers and workers look for a coordinator.
        self.join = f"{self.network.addresses[HEAD]}:{PORT}"
        self.processes: dict[str, Running] = {}
        self._settings = dict(settings or {})
        self._insecure = insecure
        self._directory = site.place.root / self.job
        self._directory.mkdir()
        self._watch: Running | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        if error is not None:
            error.add_note(self.story())
        else:
            self.check_secrets()

    # ---- processes

    def coordinator(self, *flags: str | Path, machine: str = HEAD) -> Running:
        """Start one, with a file of settings as an operator would write it."""
        settings = {
            "cluster.job": self.job,
            "cluster.servers": len(SERVERS),
            "cluster.workers": len(WORKERS),
            "cluster.store": self.site.store,
            "cluster.store_password_file": str(self.site.password_file),
            "cluster.lease_s": LEASE_S,
            "cluster.join_timeout_s": PATIENCE_S,
            "training.slices_per_step": SLICES_PER_STEP,
            "training.seed": SEED,
            "checkpoint.dir": "none",
            **self._settings,
        }
        if "," in self.join:
            settings["cluster.coordinator"] = self.join
        file = self._directory / f"{machine}.toml"
        sections: dict[str, list[str]] = {}
        for key, value in settings.items():
            section, _, leaf = key.partition(".")
            sections.setdefault(section, []).append(f"{leaf} = {json.dumps(value)}")
        file.write_text("\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items()) + "\n")
        listen = f"{self.network.addresses[machine]}:{PORT}"
        outputs = ("--summary", self.summary_path(machine))
        return self.start(
            "coordinator",
            machine,
            "--config",
            file,
            "--listen",
            listen,
            *outputs,
            *flags,
            name=f"coordinator@{machine}",
        )

    def server(self, machine: str, *flags: str | Path) -> Running:
        """Start one."""
        return self.start("server", machine, "--join", self.join, *flags)

    def worker(self, machine: str, *flags: str | Path, script: Path = DIGITS) -> Running:
        """Start one."""
        environ = {"MACHINES_HURRY": str(self._directory / "hurry")}
        words = ("--join", self.join, *flags, "--", script, "--epochs", str(EPOCHS))
        return self.start("worker", machine, *words, environ=environ)

    def start(
        self, role: str, machine: str, *words: str | Path, name: str = "", environ: Mapping[str, str] | None = None
    ) -> Running:
        """``paramserver start`` on a machine, with that machine's certificate."""
        trust: tuple[str | Path, ...] = (
            ("--insecure",) if self._insecure else ("--certs", self.site.trust(machine, role))
        )
        running = self.site.command(machine, "start", role, *trust, *words, role=role, environ=environ)
        name = name or machine
        assert name not in self.processes, name
        self.processes[name] = running
        return running

    def everybody(self, script: Path = DIGITS) -> None:
        """Start all six, in no order."""
        self.coordinator()
        self.members(script)

    def members(self, script: Path = DIGITS) -> None:
        """Start all servers and workers."""
        for machine in SERVERS:
            self.server(machine)
        for machine in WORKERS:
            self.worker(machine, script=script)

    def hurry(self) -> None:
        """From now on the workers of ``paced.py`` go as fast as they can."""
        (self._directory / "hurry").touch()

    # ---- what they say

    def command(self, *tokens: str | Path) -> Running:
        """A command that an operator gives on the first machine."""
        where: tuple[str | Path, ...] = ("--coordinator", self.join)
        how: tuple[str | Path, ...] = ("--insecure",) if self._insecure else ("--certs", self.site.trust(HEAD, "admin"))
        return self.site.command(HEAD, *tokens, *where, *how, role="admin")

    def status_when(
        self, what: str, true: Callable[[dict[str, Any]], bool], deadline_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The first status of which it is true. ``paramserver status --watch`` gives one a second."""
        seen = ""

        def found() -> dict[str, Any] | None:
            nonlocal seen
            if self._watch is None or self._watch.ended:  # no coordinator yet, or none any more
                self._watch = self.command("status", "--watch", "--json")
            lines = [line for line in self._watch.out.splitlines() if line.endswith("}")]
            if not lines or lines[-1] == seen:
                return None
            seen = lines[-1]
            facts: dict[str, Any] = json.loads(seen)
            return facts if true(facts) else None

        try:
            facts = until(what, found, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlast status: {seen or 'none'}") from None
        assert facts is not None
        return facts

    def finish(self, deadline_s: float = PATIENCE_S) -> dict[str, Done]:
        """Until all have ended, each with exit code 0."""
        return {name: running.wait(deadline_s).check() for name, running in self.processes.items()}

    def summary(self, machine: str = HEAD) -> dict[str, Any]:
        """What the coordinator on that machine has written."""
        return read_summary(self.summary_path(machine))

    def summary_path(self, machine: str = HEAD) -> Path:
        """Where the coordinator on that machine writes it."""
        return self._directory / f"{machine}.json"

    def story(self) -> str:
        """What everybody has said."""
        return "\n".join(f"=== {name}\n{running.out}{running.err}" for name, running in self.processes.items())

    # ---- the end

    def check_secrets(self) -> None:
        """Nothing secret was said by anybody."""
        story = self.story() + (self._watch.out + self._watch.err if self._watch is not None else "")
        assert not [len(secret) for secret in self.site.secrets if secret in story], "a secret was printed"

    def close(self) -> None:
        """Kill what still runs, and heal the network."""
        for running in (*self.processes.values(), *([self._watch] if self._watch is not None else [])):
            running.kill()
        for machine in MACHINES:
            self.network.heal(machine)
        left = {machine: self.network.pids(machine) for machine in (*SERVERS, *WORKERS)}
        assert not any(left.values()), f"processes are left: {left}"


def digests(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of weights, buffers and optimizer state."""
    return summary["weights_sha256"], summary["buffers_sha256"], summary["optimizer_sha256"]


def processes(facts: Mapping[str, Any], role: str) -> dict[str, dict[str, Any]]:
    """Those of a role in a status, by the host they are on."""
    return {p["address"].partition(":")[0]: p for p in facts["processes"] if p["role"] == role}


def arguments(pid: int) -> str:
    """The command line and the environment of a process, as others on its machine see the former."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
