"""The coordinator that a command talks to, and the certificate and token that the command shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cyclopts import Parameter

from paramserver.cli.common import Address, Directory, Name
from paramserver.config import load_settings, split_addresses
from paramserver.errors import ConfigError, UnavailableError
from paramserver.machine.jobs import call_coordinator, fetch_status, find_job

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from paramserver.transport.security.access import Security
    from paramserver.v1.coordinator_pb2 import StatusResponse

M = TypeVar("M", bound="Message")

# Roles whose certificate is used: the first one in the directory.
_ROLES = ("admin", "coordinator", "server", "worker")


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator, or several with commas between, of which one leads."""

    addresses: str
    security: Security

    def status(self) -> StatusResponse:
        """The status of the job. Raises UnavailableError or DeadlineError."""
        return _harmless(fetch_status(self.addresses, security=self.security))

    def call(self, method: str, request: Message, timeout_s: float) -> Message:
        """One call. Raises the error with which the coordinator refuses it."""
        return _harmless(call_coordinator(self.addresses, method, request, timeout_s, self.security))


def _harmless(reply: M) -> M:
    """The answer with texts that may be printed: they come from all processes of the job."""
    from paramserver.wire.texts import harmless

    return harmless(reply)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Where:
    """The flags of all commands that talk to a running job.

    Parameters
    ----------
    job
        Name of the job, where several run on this machine.
    coordinator
        Address of the coordinator, host:port, where the job runs elsewhere.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Talk to another machine without TLS.
    """

    job: Name = None
    coordinator: Address = None
    certs: Directory = None
    insecure: bool | None = None


# No flag is given.
NEAR = Where()


def find_target(where: Where) -> Target:
    """The coordinator that the flags name, else the one of a job on this machine, else the configured one.

    Raises ConfigError for flags that contradict each other, UnavailableError if no such job is known here.
    """
    job, coordinator, certs, insecure = where.job, where.coordinator, where.certs, where.insecure
    if job is not None and coordinator is not None:
        raise ConfigError("--job and --coordinator both name a job; give one of them")
    settings = load_settings(
        overrides={"cluster.coordinator": coordinator, "security.certs": certs, "security.insecure": insecure}
    )
    from paramserver.pki.security import load_security

    addresses, token = settings.cluster.coordinator, ""
    if coordinator is None:
        try:
            found = find_job(job)
        except UnavailableError:
            if job is not None or not addresses:
                raise
        else:
            addresses, token = found.coordinator, found.admin_token
            given = {"security.certs": certs or found.certs or None, "security.insecure": insecure or found.insecure}
            settings = load_settings(overrides={**given, "cluster.coordinator": addresses})
    assert split_addresses(addresses)
    directory = Path(settings.security.certs) if settings.security.certs else None
    role = "admin"
    if directory is not None:
        role = next((role for role in _ROLES if (directory / f"{role}.key").is_file()), "admin")
    return Target(addresses, load_security(settings, role, token))
