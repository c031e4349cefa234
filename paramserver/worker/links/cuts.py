"""Asynchronous mode: one state of all shards, for those who read and do not train."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from paramserver import errors
from paramserver.core.versions.events import Exactly, Latest
from paramserver.worker.links.pulls import Pulling
from paramserver.worker.weights.pulled import Pulled

# Of the servers by index, versions that hold the same contributions.
Snapshot = Callable[[], Awaitable[Sequence[int]]]


def same(results: Sequence[Pulled]) -> bool:
    """Whether these versions of all shards hold the same contributions."""
    return len({(result.version, result.counted) for result in results}) == 1


class Cuts(Pulling):
    """What all shards have in common."""

    async def pull_cut(self, snapshot: Snapshot, frozen: bool = False) -> list[Pulled]:
        """Versions that hold the same contributions, none of which had been counted only after this call.

        ``snapshot`` has the servers make such versions. It is asked where those that are there differ.
        """
        servers = range(len(self.channels))
        if len(servers) == 1:
            return await self.pull(Latest(), frozen)
        while True:
            newest = await asyncio.gather(*(self._pull_one(s, Latest(), False, bare=True) for s in servers))
            versions = [one.version for one in newest] if same(newest) else await snapshot()
            try:
                return await asyncio.gather(
                    *(self._pull_one(s, Exactly(versions[s]), frozen) for s in servers),
                )
            except errors.GoneError:  # a slow reader: there are newer ones by now
                continue
