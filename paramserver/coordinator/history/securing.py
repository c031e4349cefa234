"""When a version is safe: in a complete checkpoint, also if several attempts are needed for that."""

from __future__ import annotations

import asyncio
import time

import structlog

from paramserver import errors
from paramserver.checkpoint.manifest import COPIES_KEPT
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02
_RETRY_S = 0.2


async def make_safe(job: ports.Commands, checkpoints: Checkpoints, version: int) -> None:
    """Return when a checkpoint of ``version`` or a later one is complete, or cannot be had; at once without a place.

    Raises RolledBackError if the job goes back to an earlier one meanwhile.
    """
    timeline, begun = job.timeline, time.monotonic()
    while checkpoints.place is not None:
        checkpoints.check(timeline)
        if checkpoints.safe(version):
            return
        try:
            if not await _room(job):
                await asyncio.sleep(_LOOK_S)
                continue
            reached = await checkpoints.cut()
            if await checkpoints.wait_settled(reached):
                return
        except errors.RolledBackError:
            raise
        except errors.RetryableError as error:
            log.info(f"the last checkpoint waits: {error}")
            await asyncio.sleep(_RETRY_S)
            continue
        if checkpoints.try_again(reached, time.monotonic() - begun):
            await asyncio.sleep(_LOOK_S)
        elif reached >= version:
            for missing in checkpoints.given_up():
                await checkpoints.sweep(missing)
            checkpoints.overdue.last_missing(reached, checkpoints.last)
            return


async def _room(job: ports.Commands) -> bool:
    """Whether every server has room for another copy. A server without room would skip it."""
    writing = [
        sum(copy.state != shard_pb2.COPY_STATE_SKIPPED for copy in reply.copies) for reply in await job.shard_stats()
    ]
    return max(writing, default=COPIES_KEPT) < COPIES_KEPT  # no answer at all: not now
