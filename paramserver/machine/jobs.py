"""The jobs that run on this machine: one small file per job, and the call that asks its coordinator.

The files lie in a directory that only this user can enter. A launcher publishes its job when the coordinator listens
and withdraws it at the end; a file whose launcher is gone is removed by the next process that looks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paramserver.config import is_address, is_job_name, split_addresses
from paramserver.config.private import check_private, runtime_directory, sweep_tokens
from paramserver.errors import ConfigError, UnavailableError
from paramserver.machine.runtime import read, write
from paramserver.processes.alive import is_alive

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from paramserver.transport.security.access import Security
    from paramserver.v1.coordinator_pb2 import StatusResponse

STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job of this machine.

    `coordinator` is host:port, `pid` the launcher's, `started` its wall-clock time in seconds (only to be shown).
    `birth` tells the launcher from a later process with the same pid; 0 if the system does not say. `admin_token` is
    the operators' token, if the job was given none; `certs` and `insecure` are the settings of [security].
    `logs` is the directory with the output of the processes, if a launcher keeps it.
    """

    name: str
    coordinator: str
    pid: int
    started: float
    birth: int = 0
    admin_token: str = field(default="", repr=False)
    certs: str = ""
    insecure: bool = False
    logs: str = ""


def publish_job(job: Job) -> Path:
    """Make the job known on this machine. Raises ConfigError if a running job has the same name."""
    assert is_job_name(job.name), job.name
    assert is_address(job.coordinator), job.coordinator
    running = {other.name: other for other in list_jobs()}
    if job.name in running and running[job.name].pid != job.pid:
        raise ConfigError(
            f'a job named "{job.name}" runs already (process {running[job.name].pid}); '
            "stop it, or choose another name with --job"
        )
    return write(f"{job.name}.json", job)


def withdraw_job(job: Job) -> None:
    """Forget the job; nothing happens if another process has published the name since."""
    path = runtime_directory() / f"{job.name}.json"
    if read(path, Job) == job:
        path.unlink(missing_ok=True)


def list_jobs() -> list[Job]:
    """The running jobs of this user, by name. Files of jobs that are gone, or that make no sense, are removed."""
    directory = runtime_directory()
    try:
        check_private(directory)
    except FileNotFoundError:
        return []
    sweep_tokens(directory)
    jobs = []
    for path in sorted(directory.glob("*.json")):
        job = read(path, Job)
        if job and job.name == path.stem and is_address(job.coordinator) and is_alive(job.pid, job.birth):
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
    """The status of the job of the coordinator at `address`. Blocking; raises UnavailableError or DeadlineError."""
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
