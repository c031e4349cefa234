"""Whether all servers stand at one version, and waiting until they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.work.counted import counted
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import shard_pb2, types_pb2

_EVEN_S = 10.0
_LOOK_S = 0.02


class _Job(ports.Stage, ports.Commands, Protocol):
    pass


def one_version(stats: Sequence[shard_pb2.StatsResponse]) -> bool:
    """Whether these answers, at least one, are of servers that stand at one version of one timeline."""
    return len({(one.timeline, one.version) for one in stats}) == 1


async def same_slices(job: _Job) -> bool:
    """Whether all servers have counted the same slices. In synchronous mode the version says that already."""
    if job.consistency.mode is Mode.SYNC:
        return True
    replies = await counted(job)
    return all(reply == replies[0] for reply in replies)


async def stand_even(job: _Job, at_rest: bool = False) -> list[shard_pb2.StatsResponse] | None:
    """What the servers say once they stand at one version; None if they do not come to in 10 s.

    ``at_rest``: no server is missing, and all have counted the same slices. Raises RolledBackError if the job goes back
    meanwhile.
    """
    deadline = time.monotonic() + _EVEN_S
    while True:
        if job.state == types_pb2.JOB_STATE_RECOVERING:
            raise errors.RolledBackError("the job goes back to a checkpoint")
        stats = await job.server_stats()
        rests = not at_rest or len(stats) == job.options.servers
        if rests and one_version(stats) and (not at_rest or await same_slices(job)):
            return stats
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(_LOOK_S)
