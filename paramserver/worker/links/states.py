"""Reads the optimizer state of all shards, in synchronous mode that of one version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import cast

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.tensors.codec import Ref, split_frame
from paramserver.v1 import shard_pb2
from paramserver.worker.links.targets import Targets

_PARK_S = 5.0

Parts = list[tuple[shard_pb2.StateRef, memoryview]]
Frames = AsyncGenerator[tuple[shard_pb2.FrameHeader, list[tuple[Ref, memoryview]]], None]


class States:
    """Reads optimizer state."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    async def read(self, version: int, together: bool) -> tuple[int, Parts]:
        """The optimizer state of all shards, of ``version`` or a later one; and of which.

        ``together``: of the same version on all shards, which is promised in synchronous mode only. Otherwise each
        shard tells its present state, and the version is the newest of them.
        """
        return await self._targets.persist(
            0,
            "to read the optimizer state",
            lambda timeout_s: self._read(version, together, timeout_s),
            2 * sum(self._targets.nbytes),
        )

    async def _read(self, version: int, together: bool, timeout_s: float) -> tuple[int, Parts]:
        shards = range(len(self._targets))
        # By shard, the version that it names, and the rest of its answer.
        begun: dict[int, tuple[int, Frames]] = {}
        async with AsyncExitStack() as stack:
            while True:
                # A server keeps the state of the version that it names first, however long that takes to read.
                missing = [shard for shard in shards if shard not in begun]
                found = await asyncio.gather(*(self._begin(shard, version, timeout_s) for shard in missing))
                for shard, answer in zip(missing, found, strict=True):
                    begun[shard] = answer
                    await stack.enter_async_context(aclosing(answer[1]))
                version = max(named for named, _ in begun.values())
                behind = [shard for shard, (named, _) in begun.items() if named < version]
                if not together or not behind:
                    break
                for shard in behind:
                    await begun.pop(shard)[1].aclose()
            parts = await asyncio.gather(*(_parts(self._targets.names[shard], begun[shard][1]) for shard in shards))
        return version, [part for each in parts for part in each]

    async def _begin(self, shard: int, version: int, timeout_s: float) -> tuple[int, Frames]:
        """The version that a server names, and the rest of its answer. Raises UnavailableError after ``timeout_s``."""
        request = shard_pb2.ExportRequest(
            job=self._targets.job, timeline=self._targets.timeline, min_version=version, wait_s=min(_PARK_S, timeout_s)
        )
        frames = _frames(self._targets.channels[shard].download("Shard.Export", request, timeout=timeout_s + _PARK_S))
        async for header, _ in frames:
            if header.pull.ready:
                return header.pull.version, frames
            break
        await frames.aclose()
        raise errors.UnavailableError(f"{self._targets.names[shard]} has no version {version} yet")


async def _parts(name: str, frames: Frames) -> Parts:
    found: Parts = []
    async for _, parts in frames:
        for ref, data in parts:
            if not isinstance(ref, shard_pb2.StateRef):
                raise errors.ProtocolError(f"{name} sent weights where optimizer state was asked for")
            found.append((ref, data))
    return found


async def _frames(raws: AsyncIterator[AnyFrame]) -> Frames:
    async with aclosing(cast("AsyncGenerator[AnyFrame, None]", raws)) as coming:
        async for raw in coming:
            yield split_frame(raw)
