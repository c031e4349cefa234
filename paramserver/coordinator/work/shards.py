"""How the servers stand: their versions, the slices that they have counted, and waiting until they agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from paramserver import errors
from paramserver.checkpoint.manifest import COPIES_KEPT
from paramserver.coordinator import ports
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.life import Phase
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.counted import in_all, of_one, united
from paramserver.core.work.leases import SliceLeases
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import slices_from_proto

_EVEN_S = 10.0
_LOOK_S = 0.02


class _Stage(ports.Stage, ports.Commands, Protocol):
    pass


class _Job(_Stage, Protocol):
    schedule: Schedule


def one_version(stats: Sequence[shard_pb2.StatsResponse]) -> bool:
    """Whether these answers, at least one, are of servers that stand at one version of one timeline."""
    return len({(one.timeline, one.version) for one in stats}) == 1


async def same_slices(job: _Stage) -> bool:
    """Whether all servers have counted the same slices. In synchronous mode the version says that already."""
    if job.consistency.mode is Mode.SYNC:
        return True
    replies = await _counted(job)
    return all(reply == replies[0] for reply in replies)


async def stand_even(job: _Stage, at_rest: bool = False) -> list[shard_pb2.StatsResponse] | None:
    """Wait until the servers stand at one version, and return their answers; None if they do not within 10 s.

    ``at_rest``: also wait until all servers have counted the same slices. Raises RolledBackError if the
    job goes back meanwhile.
    """
    deadline = time.monotonic() + _EVEN_S
    while True:
        if job.life.phase is Phase.RECOVERING:
            raise errors.RolledBackError("the job goes back to a checkpoint")
        stats = await job.shards.stats()
        if one_version(stats) and (not at_rest or await same_slices(job)):
            return stats
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(_LOOK_S)


async def lease_table(job: _Job) -> SliceLeases | None:
    """A lease table made from the answers of all shards: a slice is done when every shard has counted it.

    None in synchronous mode, and before the data is known: no slice has been leased then.
    """
    if job.consistency.mode is Mode.SYNC or job.schedule.data is None:
        return None
    done = in_all([slices_from_proto(reply.epochs) for reply in await _counted(job)])
    epoch, before = job.schedule.done_synchronously()
    return SliceLeases.restored(job.schedule.slices_per_epoch, epoch, united([done, of_one(epoch, before)]))


async def _counted(job: ports.Commands) -> list[shard_pb2.CountedResponse]:
    """The slices that each shard has counted."""
    request = shard_pb2.CountedRequest(job=job.options.job, timeline=job.timeline)
    return await job.shards.ask("Shard.Counted", request, shard_pb2.CountedResponse)


async def room(job: ports.Commands) -> bool:
    """Whether every server has room for another copy. A server without room would skip it."""
    writing = [
        sum(copy.state != shard_pb2.COPY_STATE_SKIPPED for copy in reply.copies) for reply in await job.shards.stats()
    ]
    return max(writing, default=COPIES_KEPT) < COPIES_KEPT  # no answer at all: not now
