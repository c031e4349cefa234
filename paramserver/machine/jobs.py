"""Which jobs run on this machine: one small file per job, and the call that asks its coordinator.

The files lie in a directory that only this user can enter. A launcher publishes its job when the coordinator listens
and withdraws it at the end; a file whose launcher is gone is removed by whoever looks next.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paramserver.config import is_address, is_job_name, split_addresses
from paramserver.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from paramserver.transport.security.access import Security
    from paramserver.v1.coordinator_pb2 import StatusResponse

ENV_RUNTIME_DIR = "PARAMSERVER_INTERNAL_RUNTIME_DIR"
STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job of this machine.

    `coordinator` is host:port, `pid` the launcher's, `started` its wall-clock time in seconds (only to be shown).
    `birth` tells the launcher from a later process with the same pid; 0 if the system does not say. `admin_token` is
    the operators' token, if the job was given none; `certs` and `insecure` are the settings of [security].
    """

    name: str
    coordinator: str
    pid: int
    started: float
    birth: int = 0
    admin_token: str = field(default="", repr=False)
    certs: str = ""
    insecure: bool = False


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where the files of this user's jobs lie; the directory need not exist."""
    environ = os.environ if environ is None else environ
    if explicit := environ.get(ENV_RUNTIME_DIR):
        return Path(explicit)
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "paramserver"
    return Path(tempfile.gettempdir()) / f"paramserver-{os.getuid()}"


def secure_runtime_directory() -> Path:
    """The runtime directory, made if missing. Raises ConfigError if others could write there."""
    directory = runtime_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
    except OSError as error:
        raise ConfigError(
            f'runtime directory "{directory}" cannot be used ({error.strerror}); set XDG_RUNTIME_DIR to one of yours'
        ) from error
    return directory


def process_birth(pid: int) -> int:
    """A number that tells this process from a later one with the same pid, or 0 if the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command's name, in parentheses, may hold anything; the start time is the 20th field after it.
    return int(text.rpartition(")")[2].split()[19])


def publish_job(job: Job) -> Path:
    """Make the job known on this machine. Raises ConfigError if a running job has the same name."""
    assert is_job_name(job.name), job.name
    assert is_address(job.coordinator), job.coordinator
    directory = secure_runtime_directory()
    running = {other.name: other for other in list_jobs()}
    if job.name in running and running[job.name].pid != job.pid:
        raise ConfigError(
            f'a job named "{job.name}" runs already (process {running[job.name].pid}); '
            "stop it, or choose another name with --job"
        )
    path = directory / f"{job.name}.json"
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".job-")  # readable for this user only
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(job), file)
    os.replace(temporary, path)
    return path


def withdraw_job(job: Job) -> None:
    """Forget the job; nothing happens if another process has published the name since."""
    path = runtime_directory() / f"{job.name}.json"
    if _read(path) == job:
        path.unlink(missing_ok=True)


def list_jobs() -> list[Job]:
    """The running jobs of this user, by name. Files of jobs that are gone, or that make no sense, are removed."""
    directory = runtime_directory()
    try:
        _check_private(directory)
    except FileNotFoundError:
        return []
    jobs = []
    for path in sorted(directory.glob("*.json")):
        job = _read(path)
        if job is not None and job.name == path.stem and _is_alive(job):
            jobs.append(job)
        else:
            path.unlink(missing_ok=True)
    return jobs


def find_job(name: str | None = None) -> Job:
    """The running job called `name`, or the only one.

    Raises UnavailableError if there is none, ConfigError if there are several to choose from; both name what runs.
    """
    jobs = list_jobs()
    names = ", ".join(job.name for job in jobs)
    if name is not None:
        for job in jobs:
            if job.name == name:
                return job
        raise UnavailableError(f'no job named "{name}" runs here; ' + (f"running: {names}" if jobs else "none does"))
    if not jobs:
        raise UnavailableError("no job runs on this machine; start one with: paramserver run SCRIPT")
    if len(jobs) > 1:
        raise ConfigError(f"{len(jobs)} jobs run here ({names}); choose one with --job NAME")
    return jobs[0]


def fetch_status(address: str, timeout_s: float = STATUS_TIMEOUT_S, security: Security | None = None) -> StatusResponse:
    """What the coordinator at `address` says about its job. Blocking; raises UnavailableError or DeadlineError."""
    from paramserver.v1.coordinator_pb2 import StatusRequest, StatusResponse

    response = call_coordinator(address, "Coordinator.Status", StatusRequest(), timeout_s, security)
    assert isinstance(response, StatusResponse)
    return response


def call_coordinator(
    address: str, method: str, request: Message, timeout_s: float, security: Security | None = None
) -> Message:
    """One blocking call over a connection of its own. Must not be used where an event loop runs.

    `address` may be a list with commas: the call goes to the coordinator that leads.
    """
    from paramserver.transport.grpc import connector
    from paramserver.transport.security.access import Security

    connect = connector(security or Security.open(), "coordinator")

    async def ask(one: str) -> Message:
        channel = connect(one)
        try:
            return await channel.call(method, request, timeout=timeout_s)
        finally:
            await channel.close()

    async def call() -> Message:
        standby: Message | None = None
        failure: UnavailableError | None = None
        for one in split_addresses(address):
            try:
                reply = await ask(one)
            except UnavailableError as error:
                failure = failure or error
                continue
            if getattr(reply, "term", 1):
                return reply
            standby = reply
        if standby is not None:
            return standby
        assert failure is not None, "there is at least one address"
        raise failure

    return asyncio.run(call())


def _check_private(directory: Path) -> None:
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f'runtime directory "{directory}" is not a directory of yours; remove it')
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f'runtime directory "{directory}" is open to others; run: chmod 700 "{directory}"')


def _read(path: Path) -> Job | None:
    try:
        job = Job(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    types_fit = isinstance(job.pid, int) and isinstance(job.birth, int) and isinstance(job.name, str)
    return job if types_fit and isinstance(job.coordinator, str) and is_address(job.coordinator) else None


def _is_alive(job: Job) -> bool:
    try:
        os.kill(job.pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return False  # the pid is another user's by now, or none at all
    return job.birth in (0, process_birth(job.pid))
