"""Memory that this worker shares with servers of its host, and the ways to these servers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from paramserver.transport.base import Channel, Neighbour
from paramserver.worker.links.targets import Targets

if TYPE_CHECKING:
    from paramserver.worker.memory.shared import Attached, SharedMemory

log = structlog.get_logger("paramserver.worker")

_ATTACH_S = 10.0
# The most servers that a reason names.
_NAMES = 4


class Near:
    """The servers that share memory with this worker: no server, some, or all."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        # None if this worker shares memory with no server.
        self.shared: SharedMemory | None = None
        # By shard: this worker attaches once at a time, since an attachment ends the former one.
        self._attaching = [asyncio.Lock() for _ in range(len(targets))]
        # By shard, why its server shares no memory; and why this worker shares memory with no server.
        self._refusals: dict[int, str] = {}
        self._withheld = ""

    def ways(self) -> list[Attached] | None:
        """By shard, the connection for the thread that trains; None if there is none to some server."""
        if self.shared is None:
            return None
        found = [self.attached(shard) for shard in range(len(self._targets))]
        ways = [one for one in found if one is not None and one.channel.undisturbed and not one.direct.gone]
        return ways if len(ways) == len(found) else None

    def attached(self, shard: int) -> Attached | None:
        """A server that shares memory with this worker, as the member that this worker is now."""
        if self.shared is None:
            return None
        return self.shared.attached(shard, self._targets.worker(), self._targets.channels[shard])

    async def attach(self, shared: SharedMemory) -> dict[int, str]:
        """Share memory with the servers on this host; by shard, why others cannot."""
        tasks = [asyncio.ensure_future(self._persist(shared, shard)) for shard in range(len(self._targets))]
        try:
            refusals = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # or one would attach after all is closed
            await shared.close()
            raise
        self.shared = shared if shared.shards else None
        self._refusals = {shard: refusal for shard, refusal in enumerate(refusals) if refusal}
        return self._refusals

    async def attach_again(self, shard: int, timeout_s: float) -> None:
        """Attach to a server to which the shard has moved, or which knows this worker by an earlier member number.

        Makes one attempt, and raises what it fails with. If the server is on another host, bytes go over the channel.
        """
        shared, targets = self.shared, self._targets
        if shared is None or not shared.outdated(shard, targets.worker(), targets.channels[shard]):
            return
        async with self._attaching[shard]:
            if not shared.outdated(shard, targets.worker(), targets.channels[shard]):
                return
            refusal = await self._attach(shared, shard, timeout_s)
        self._refusals.pop(shard, None)
        if refusal:
            self._refusals[shard] = refusal
            log.info(f"weights and gradients go over the network to {targets.names[shard]}", reason=refusal)

    def withhold(self, reason: str) -> None:
        """This worker shares memory with no server, for this reason."""
        self._withheld = reason

    async def detach(self, reason: str) -> None:
        """Share memory with no server any more, for this reason."""
        self.withhold(reason)
        shared, self.shared = self.shared, None
        if shared is not None:
            await shared.close()

    async def close(self) -> None:
        """Close the ways; where weights lie stays readable."""
        if self.shared is not None:
            await self.shared.close()

    async def moved(self, shard: int) -> None:
        """Another server has this shard: calls over the sockets to the former one end. Its memory stays readable."""
        if self.shared is not None:
            await self.shared.lost(shard)

    async def lost(self, shard: int) -> None:
        """A server has said that it shares no memory with this worker any more."""
        log.info("a server does not share memory with this worker any more", server=self._targets.names[shard])
        assert self.shared is not None
        await self.shared.lost(shard)

    async def _persist(self, shared: SharedMemory, shard: int) -> str:
        return await self._targets.persist(shard, "to attach", partial(self._attach, shared, shard))

    async def _attach(self, shared: SharedMemory, shard: int, timeout_s: float) -> str:
        targets = self._targets
        channel, timeout_s = targets.channels[shard], min(timeout_s, _ATTACH_S)
        return await shared.attach(shard, channel, targets.job, targets.timeline, targets.worker(), timeout_s)

    def way(self, shard: int) -> Channel | Neighbour:
        """The way for small messages to a server: a socket of this host if the server shares memory."""
        attached = self.attached(shard)
        return self._targets.channels[shard] if attached is None else attached.channel

    @property
    def receives_in_place(self) -> bool:
        """Whether some server sends weights over a transport that receives them where they belong."""
        return any(channel.kind == "bulk" for channel in self._targets.channels)

    @property
    def kind(self) -> str:
        """The transport of weights and gradients, as `status` shows it."""
        channels = self._targets.channels
        kinds = [channel.kind for channel in channels]
        kind = next((one for one in kinds if ":" in one), kinds[0] if kinds else "")
        if self.shared is None or not self.shared.shards:
            return kind
        return "shm" if len(self.shared.shards) == len(channels) else f"shm+{kind}"

    @property
    def reason(self) -> str:
        """Why weights and gradients are not in shared memory, as `status` shows it; empty: they are."""
        if self._withheld:
            return self._withheld
        # By reason, the servers without repetition: one may have several shards.
        servers: dict[str, dict[str, None]] = {}
        for shard, refusal in sorted(self._refusals.items()):
            servers.setdefault(refusal, {})[self._targets.names[shard]] = None
        return "; ".join(f"{_listed([*names])}: {refusal}" for refusal, names in servers.items())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMES]) + ", …" * (len(names) > _NAMES)
