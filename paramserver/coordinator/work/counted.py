"""Asynchronous mode: what has been done, as the shards know it."""

from __future__ import annotations

from typing import Protocol

from paramserver.coordinator import ports
from paramserver.coordinator.work.leasing import Leasing
from paramserver.core.versions.ranges import RangeSet, common
from paramserver.core.work.leases import SliceLeases
from paramserver.v1 import shard_pb2


class _Job(ports.Commands, Protocol):
    leasing: Leasing

    def done_synchronously(self) -> tuple[int, list[tuple[int, int]]]: ...


async def counted(job: ports.Commands) -> list[shard_pb2.CountedResponse]:
    """The slices that each shard has counted."""
    request = shard_pb2.CountedRequest(job=job.options.job, timeline=job.timeline)
    return await job.ask_servers("Shard.Counted", request, shard_pb2.CountedResponse)


async def lease_table(job: _Job) -> SliceLeases:
    """The lease table as the shards know it: a slice is done when every shard has counted it."""
    shards = [
        {e.epoch: RangeSet.from_ranges((part.start, part.stop) for part in e.slices) for e in reply.epochs}
        for reply in await counted(job)
    ]
    done = {e: common([shard.get(e, RangeSet()) for shard in shards]).ranges() for shard in shards for e in shard}
    epoch, before = job.done_synchronously()
    done[epoch] = (*done.get(epoch, ()), *before)
    per_epoch = job.leasing.data.slices_per_epoch if job.leasing.data else 0
    return SliceLeases.restored(per_epoch, epoch, done)
