"""A version at which all shards of a running job stand with nothing open: workers wait from there on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.shards import stand_even
from paramserver.v1 import shard_pb2

# Versions from the newest version to the one at which shards stand. Doubled when some shard was past it.
_MARGIN, _ATTEMPTS = 2, 12
_LOOK_S = 0.005


class _Job(ports.Stage, ports.Commands, Protocol):
    checkpoints: Checkpoints
    leasing: Leasing


async def at_rest(job: _Job, plan: int, deadline: float, check: Callable[[], None]) -> tuple[float, int]:
    """Bring all shards to rest at one version; since when they rest (monotonic seconds), and the version.

    ``plan``: the number of the plan for which they do that. ``check`` raises if that is not wanted any more. Raises
    DeadlineError if it takes too long, UnavailableError if the shards do not come to stand.
    """
    if job.leasing.table is not None:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                began = time.monotonic()
                await job.leasing.drain()
        except TimeoutError as error:
            raise errors.DeadlineError("the workers have not finished their slices in time: try again") from error
        stats = await stand_even(job, at_rest=True)
        if stats is None:
            raise errors.UnavailableError("the servers do not come to stand at one version: try again")
        version = stats[0].version
    else:
        began, version = await _stand(job, plan, deadline, check)
    while time.monotonic() < deadline:
        check()
        if not job.checkpoints.cutting and not any(one.copies for one in await job.shards.stats()):
            return began, version
        await asyncio.sleep(_LOOK_S)
    raise errors.DeadlineError("a checkpoint is still being written: try again")


async def _stand(job: _Job, plan: int, deadline: float, check: Callable[[], None]) -> tuple[float, int]:
    """Synchronous mode: let nobody go past a version that lies ahead, and wait until all shards have made it."""
    margin = _MARGIN
    for _ in range(_ATTEMPTS):
        newest = max(one.version for one in await job.shards.stats())
        version = job.checkpoints.possible(newest + margin)
        request = shard_pb2.CutRequest(
            job=job.options.job,
            timeline=job.timeline,
            term=job.term,
            step=shard_pb2.CutRequest.STEP_STAND,
            version=version,
            number=plan,
        )
        replies = await job.shards.ask("Shard.Cut", request, shard_pb2.CutResponse)
        if all(reply.taken for reply in replies):
            break
        margin *= 2
    else:
        raise errors.UnavailableError("the shards are always faster than the request: try again")
    while time.monotonic() < deadline:
        check()
        if min(one.version for one in await job.shards.stats()) >= version:
            return time.monotonic(), version
        await asyncio.sleep(_LOOK_S)
    raise errors.DeadlineError(
        f"version {version} was not reached in time: see `paramserver status` for whom the job waits"
    )
