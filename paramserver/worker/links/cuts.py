"""Asynchronous mode: one state of all shards, for readers, which do not train."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from paramserver import errors
from paramserver.core.versions.events import Latest
from paramserver.worker.links.pulls import Pull, exactly
from paramserver.worker.links.shards import ShardLinks
from paramserver.worker.weights.pulled import Pulled

# Gives, by shard, versions that hold the same contributions.
Snapshot = Callable[[], Awaitable[Sequence[int]]]


def same(results: Sequence[Pulled]) -> bool:
    """Whether these versions of all shards hold the same contributions."""
    return len({(result.version, result.counted) for result in results}) == 1


async def pull_cut(links: ShardLinks, snapshot: Snapshot) -> list[Pulled]:
    """By shard, versions that hold the same contributions, among them all that were counted before this call.

    ``snapshot`` has the servers make versions with the same contributions. It is called if the newest ones differ.
    """
    pulls = links.pulls
    if len(links.channels) == 1:
        return await pulls.ask(Pull(Latest()))
    while True:
        newest = await pulls.ask(Pull(Latest(), bare=True, tells=False))
        versions = [one.version for one in newest] if same(newest) else await snapshot()
        try:
            return await pulls.ask(Pull(exactly(versions)))
        except errors.GoneError:  # a slow reader: there are newer ones by now
            continue
