"""``paramserver doctor``: possible problems of this machine, and their remedies. One file per group of checks."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paramserver.config import Settings, split_addresses
from paramserver.doctor import certificates, configuration, machine, network, sockets, software, storage
from paramserver.doctor.configuration import Request
from paramserver.doctor.finding import Check, Finding, Level, clean, run_checks
from paramserver.errors import ParamServerError
from paramserver.machine.jobs import list_jobs

if TYPE_CHECKING:
    from paramserver.transport.base import Channel
    from paramserver.transport.security.access import Security

__all__ = ["Finding", "Level", "Request", "diagnose"]

# Roles whose certificate is shown to the coordinator: the first role with a key here. The way back needs a server's.
_OWN_ROLES = ("server", "worker", "admin", "coordinator")


def diagnose(request: Request) -> list[Finding]:
    """All findings, in the order of the groups. Blocks for some seconds; never raises."""
    settings, about_settings = configuration.read_settings(request)
    settings = with_running_job(settings)
    environ = request.environ

    def look_at_imports() -> Sequence[Finding]:
        found = software.try_imports()
        torch = found["torch"]
        return [
            software.check_import("paramserver", found["paramserver"]),
            software.check_import("torch", torch),
            software.check_kernels(found["kernels"]),
            software.check_gpu(settings.training.device, torch, software.count_gpus()),
        ]

    running = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    certs = Path(settings.security.certs) if settings.security.certs else None
    meeting = Path(settings.cluster.meeting_dir)
    installed, needs = software.installed_version, software.requirements_of
    return run_checks(
        [
            Check("python", lambda: software.check_python(running, platform.python_implementation())),
            Check("packages", lambda: software.check_packages(needs("paramserver"), installed)),
            Check("protobuf", lambda: software.check_protobuf(installed, needs)),
            Check("imports", look_at_imports, software.IMPORT_TIMEOUT_S + software.NVIDIA_SMI_TIMEOUT_S + 5.0),
            Check("fork support", lambda: software.check_fork(environ)),
            Check("configuration", lambda: about_settings),
            Check("proxies", lambda: configuration.check_proxies(environ)),
            Check("security", lambda: configuration.check_security(settings)),
            Check("cpu", lambda: machine.check_cpus(machine.usable_cpus(), machine.read_limits(), settings)),
            Check("limits", lambda: machine.check_limits(machine.read_limits())),
            Check("open files", lambda: machine.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
            Check("/dev/shm", machine.check_shared_memory),
            Check("shared memory", lambda: machine.check_meeting(meeting, settings.shares_pulls)),
            Check("runtime directory", machine.check_runtime_directory),
            Check("certificates", lambda: certificates.check_certificates(certs, datetime.now(UTC))),
            Check("tokens", lambda: certificates.check_tokens(settings)),
            Check("coordinator", partial(look_at_coordinator, settings), 3 * network.DIAL_BACK_S),
            Check("store", partial(storage.look_at_store, settings)),
        ]
    )


def with_running_job(settings: Settings) -> Settings:
    """The settings, with the coordinator of the only job that runs on this machine if none is configured."""
    try:
        jobs = list_jobs()
    except ParamServerError:
        return settings  # the check of the runtime directory has its own finding
    if settings.cluster.coordinator or len(jobs) != 1:
        return settings
    job, security = jobs[0], settings.security
    cluster = settings.cluster.model_copy(update={"coordinator": job.coordinator})
    own = security.model_copy(update={"certs": security.certs or job.certs})
    return settings.model_copy(update={"cluster": cluster, "security": own})


async def look_at_coordinator(settings: Settings) -> list[Finding]:
    """The way to the coordinator, the coordinator itself, and the way back."""
    from paramserver.membership.joining import versions
    from paramserver.pki.security import load_security
    from paramserver.wire.messages import PROTOCOL

    addresses = split_addresses(settings.cluster.coordinator)
    if not addresses:
        value = "none configured, and no job runs here; name one with --coordinator HOST:PORT"
        return [await network.check_listen(settings, []), Finding("coordinator", Level.NOTE, value)]
    role = own_role(settings)
    try:
        security = load_security(settings, role)
    except ParamServerError as error:
        value = clean(f"not asked, since certificate or token cannot be used: {error}")
        listen = await network.check_listen(settings, [])
        return [listen, Finding("coordinator", Level.FAIL, value, "mend that first")]
    from paramserver.transport.grpc import connector, serve

    connect = connector(security, "coordinator")
    answers = [await network.ask(address, connect) for address in addresses]
    findings = [await network.check_listen(settings, answers), network.check_reachable(answers)]
    leader = next((answer for answer in answers if answer.usable), None)
    if leader is None:
        return findings
    findings += [network.check_versions(leader, PROTOCOL, versions()), network.check_clock(leader)]
    findings.append(await look_at_sockets(settings, connect(leader.address), security))
    if role != "server":
        value = f"not tried with a {role}'s certificate: only servers are called"
        return [*findings, Finding("way back", Level.NOTE, value)]
    return [
        *findings,
        await network.check_way_back(leader.address, connect, partial(serve, security=security), settings),
    ]


async def look_at_sockets(settings: Settings, leader: Channel, security: Security) -> Finding:
    """The way of weights and gradients to the servers that the coordinator names. Closes the channel to the leader."""
    from paramserver.transport.bulk import BulkChannel
    from paramserver.transport.grpc.channel import connect
    from paramserver.v1.coordinator_pb2 import StatusRequest

    try:
        servers = await sockets.servers_of(
            partial(leader.call, "Coordinator.Status", StatusRequest(), timeout=sockets.CALL_S)
        )
    except ParamServerError as error:
        return Finding("transport", Level.NOTE, clean(f"not tried: the coordinator does not name the servers: {error}"))
    finally:
        await leader.close()

    async def attempt(address: str) -> str:
        way = BulkChannel(connect(address, security, "server"), security, "server")
        try:
            return await way.attempt(sockets.CALL_S)
        finally:
            await way.close()

    return await sockets.check_sockets(settings, servers, attempt)


def own_role(settings: Settings) -> str:
    """The role whose key is on this machine; without certificates, a server."""
    directory = settings.security.certs
    if not directory:
        return "server"
    return next((role for role in _OWN_ROLES if os.path.exists(f"{directory}/{role}.key")), "server")
