"""The way of weights and gradients to the servers of a running job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from paramserver.config import Settings
from paramserver.doctor.finding import Finding, Level, clean
from paramserver.errors import DeniedError, ParamServerError

CALL_S = 5.0
# The largest number of servers that are tried.
MOST = 8
_NAME = "transport"
_REMEDY = 'let the network pass cluster.bulk_port of the servers; or set cluster.transport = "grpc", which is slower'

# Opens a connection to the sockets of a server's address. Returns the reason if this fails, otherwise "".
Attempt = Callable[[str], Awaitable[str]]


async def servers_of(coordinator: Callable[[], Awaitable[object]]) -> dict[str, str]:
    """The addresses of the servers of the job, by name. Raises ParamServerError."""
    from paramserver.v1.coordinator_pb2 import StatusResponse

    status = await coordinator()
    assert isinstance(status, StatusResponse)
    return {one.name: one.address for one in status.processes if one.role == "server" and one.address and not one.gone}


async def check_sockets(settings: Settings, servers: Mapping[str, str], attempt: Attempt) -> Finding:
    """Whether weights and gradients of a worker on this machine would go over sockets to these servers."""
    if settings.cluster.transport == "grpc":
        return Finding(_NAME, Level.NOTE, 'weights and gradients go over gRPC, as cluster.transport = "grpc" says')
    if not servers:
        return Finding(_NAME, Level.NOTE, "not tried: the job has no servers yet")
    names = sorted(servers)[:MOST]

    async def look(name: str) -> str:
        try:
            return await attempt(servers[name])
        except DeniedError:
            raise
        except ParamServerError as error:
            return str(error)

    try:
        reasons = dict(zip(names, await asyncio.gather(*map(look, names)), strict=True))
    except DeniedError as error:
        return Finding(_NAME, Level.NOTE, clean(f"not tried: {error}"))
    broken = {name: reason for name, reason in reasons.items() if reason}
    well = ", ".join(name for name in names if name not in broken)
    if not broken:
        value = f"weights and gradients go over sockets to {well}, or over shared memory on the same host"
        return Finding(_NAME, Level.OK, value)
    lines = [f"no sockets beside gRPC to {name}: {clean(reason)}" for name, reason in broken.items()]
    return Finding(_NAME, Level.WARN, "\n".join([*lines, *([f"sockets to {well}"] if well else [])]), _REMEDY)
