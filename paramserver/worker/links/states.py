"""Reading the optimizer state of all shards, of one version where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import cast

from paramserver import errors
from paramserver.tensors.codec import Ref, split_frame
from paramserver.v1 import shard_pb2
from paramserver.worker.links.servers import Servers

_PARK_S = 5.0

Parts = list[tuple[shard_pb2.StateRef, memoryview]]


class States:
    """What this worker reads of the servers' optimizers."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def read(self, version: int, together: bool) -> tuple[int, Parts]:
        """The optimizer state of all shards, of ``version`` or a later one; and of which.

        ``together``: of the same version on all shards, which is promised in synchronous mode only. Otherwise each
        shard tells its present state, and the version is the newest of them.
        """
        return await self._servers.persist(
            0,
            "to read the optimizer state",
            lambda timeout_s: self._read(version, together, timeout_s),
            2 * sum(self._servers.nbytes),
        )

    async def _read(self, version: int, together: bool, timeout_s: float) -> tuple[int, Parts]:
        servers = range(len(self._servers))
        begun: dict[int, _Export] = {}
        async with AsyncExitStack() as stack:
            while True:
                # A server keeps the state of the version that it names first, however long that takes to read.
                missing = [server for server in servers if server not in begun]
                found = await asyncio.gather(*(self._begin(server, version, timeout_s) for server in missing))
                for server, export in zip(missing, found, strict=True):
                    begun[server] = export
                    await stack.enter_async_context(aclosing(export.frames))
                version = max(export.version for export in begun.values())
                behind = [server for server, export in begun.items() if export.version < version]
                if not together or not behind:
                    break
                for server in behind:
                    await begun.pop(server).frames.aclose()
            parts = await asyncio.gather(*(begun[server].read() for server in servers))
        return version, [part for each in parts for part in each]

    async def _begin(self, server: int, version: int, timeout_s: float) -> _Export:
        """The answer of a server, of which the version is known. Raises UnavailableError if there is none in time."""
        request = shard_pb2.ExportRequest(
            job=self._servers.job, timeline=self._servers.timeline, min_version=version, wait_s=min(_PARK_S, timeout_s)
        )
        frames = _frames(self._servers.channels[server].download("Shard.Export", request, timeout=timeout_s + _PARK_S))
        async for header, _ in frames:
            if header.pull.ready:
                return _Export(server, header.pull.version, frames)
            break
        await frames.aclose()
        raise errors.UnavailableError(f"server-{server} has no version {version} yet")


class _Export:
    """What one server answers."""

    def __init__(self, server: int, version: int, frames: Frames) -> None:
        self.server, self.version, self.frames = server, version, frames

    async def read(self) -> Parts:
        """All pieces."""
        found: Parts = []
        async for _, parts in self.frames:
            for ref, data in parts:
                if not isinstance(ref, shard_pb2.StateRef):
                    raise errors.ProtocolError(f"server-{self.server} sent weights where optimizer state was asked for")
                found.append((ref, data))
        return found


Frames = AsyncGenerator[tuple[shard_pb2.FrameHeader, list[tuple[Ref, memoryview]]], None]


async def _frames(raws: AsyncIterator[bytes]) -> Frames:
    async with aclosing(cast("AsyncGenerator[bytes, None]", raws)) as coming:
        async for raw in coming:
            yield split_frame(raw)
