"""Memory that this worker shares with servers of its host, and the ways to these servers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from paramserver.transport.base import Channel
from paramserver.worker.links.servers import Servers

if TYPE_CHECKING:
    from paramserver.worker.memory.shared import Attached, SharedMemory

log = structlog.get_logger("paramserver.worker")

_ATTACH_S = 10.0


class Near:
    """The servers that share memory with this worker: no server, some, or all."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        # None if this worker shares memory with no server.
        self.shared: SharedMemory | None = None

    def ways(self) -> list[Attached] | None:
        """By server, the connection for the thread that trains; None if there is none to some server."""
        if self.shared is None:
            return None
        found = [self.attached(server) for server in range(len(self._servers))]
        ways = [one for one in found if one is not None and one.channel.undisturbed and not one.direct.gone]
        return ways if len(ways) == len(found) else None

    def attached(self, server: int) -> Attached | None:
        """A server that shares memory with this worker, as the member that this worker is now."""
        return self.shared.attached(server, self._servers.worker()) if self.shared is not None else None

    async def attach(self, shared: SharedMemory) -> dict[int, str]:
        """Share memory with the servers on this host; by server, why others cannot."""
        tasks = [asyncio.ensure_future(self._persist(shared, server)) for server in range(len(self._servers))]
        try:
            refusals = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # or one would attach after all is closed
            await shared.close()
            raise
        self.shared = shared if shared.servers else None
        return {server: refusal for server, refusal in enumerate(refusals) if refusal}

    async def attach_again(self, server: int) -> None:
        """Attach again to a server that knows this worker by an earlier member number."""
        if self.shared is not None and self.shared.outdated(server, self._servers.worker()):
            await self._persist(self.shared, server)

    async def detach(self) -> None:
        """Share memory with no server any more."""
        shared, self.shared = self.shared, None
        if shared is not None:
            await shared.close()

    async def close(self) -> None:
        """Close the ways; where weights lie stays readable."""
        if self.shared is not None:
            await self.shared.close()

    async def lost(self, server: int) -> None:
        """A server has said that it shares no memory with this worker any more."""
        log.info("a server does not share memory with this worker any more", server=f"server-{server}")
        assert self.shared is not None
        await self.shared.lost(server)

    async def _persist(self, shared: SharedMemory, server: int) -> str:
        return await self._servers.persist(server, "to attach", partial(self._attach, shared, server))

    async def _attach(self, shared: SharedMemory, server: int, timeout_s: float) -> str:
        servers = self._servers
        channel, timeout_s = servers.channels[server], min(timeout_s, _ATTACH_S)
        return await shared.attach(server, channel, servers.job, servers.timeline, servers.worker(), timeout_s)

    def way(self, server: int) -> Channel:
        """The channel for small messages to a server: a socket of this host if the server shares memory."""
        attached = self.attached(server)
        return self._servers.channels[server] if attached is None else attached.channel

    @property
    def kind(self) -> str:
        """The transport of weights and gradients, as `status` shows it."""
        channels = self._servers.channels
        kind = channels[0].kind if channels else ""
        if self.shared is None or not self.shared.servers:
            return kind
        return "shm" if len(self.shared.servers) == len(channels) else f"shm+{kind}"
