"""Asynchronous mode: what has been done, as the shards know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paramserver.core.leases import SliceLeases
from paramserver.core.membership import Role
from paramserver.core.ranges import RangeSet, common
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from paramserver.coordinator.service import CoordinatorService


async def lease_table(job: CoordinatorService) -> SliceLeases:
    """The lease table as the shards know it: a slice is done when every shard has counted it."""
    request = shard_pb2.CountedRequest(job=job.options.job, timeline=job.timeline)
    replies = await job.servers.call_all(
        job.members.of(Role.SERVER), "Shard.Counted", lambda _: request, job.options.call_timeout_s
    )
    counted: list[dict[int, RangeSet]] = []
    for reply in replies:
        assert isinstance(reply, shard_pb2.CountedResponse)
        counted.append(
            {e.epoch: RangeSet.from_ranges((part.start, part.stop) for part in e.slices) for e in reply.epochs}
        )
    done = {e: common([shard.get(e, RangeSet()) for shard in counted]).ranges() for shard in counted for e in shard}
    epoch, before = job.done_synchronously()
    done[epoch] = (*done.get(epoch, ()), *before)
    per_epoch = job.leasing.data.slices_per_epoch if job.leasing.data else 0
    return SliceLeases.restored(per_epoch, epoch, done)
