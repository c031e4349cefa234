"""When a version is safe: in a complete checkpoint, also if several attempts are needed for that.

`core/procedures/securing.py` decides what is done when; here it is done.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.work.shards import room
from paramserver.core.procedures.securing import (
    Await,
    Command,
    Copied,
    Cut,
    Done,
    End,
    Event,
    Later,
    Look,
    Miss,
    Securing,
    Settled,
    Stands,
)

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02


async def make_safe(job: ports.Commands, checkpoints: Checkpoints, version: int) -> None:
    """Return when a checkpoint of ``version`` or a later one is complete, or cannot be had; at once without a place.

    Raises RolledBackError if the job goes back to an earlier one meanwhile.
    """
    if checkpoints.place is None:
        return
    timeline, begun, securing = job.timeline, time.monotonic(), Securing(version, _LOOK_S)
    while not isinstance(command := securing.command, End):
        checkpoints.check(timeline)
        try:
            event = await _perform(job, checkpoints, version, begun, command)
        except errors.RolledBackError:
            raise
        except errors.RetryableError as error:
            log.info(f"the last checkpoint waits: {error}")
            event = Later()
        securing.handle(event)


async def _perform(
    job: ports.Commands, checkpoints: Checkpoints, version: int, begun: float, command: Command
) -> Event:
    match command:
        case Look(rest_s):
            await asyncio.sleep(rest_s)
            safe = checkpoints.safe(version)
            return Stands(safe, not safe and await room(job))
        case Cut():
            return Copied(await checkpoints.cut())
        case Await(reached):
            good = await checkpoints.wait_settled(reached)
            return Settled(good, not good and checkpoints.try_again(reached, time.monotonic() - begun))
        case Miss(reached):
            for missing in checkpoints.given_up():
                await checkpoints.sweep(missing)
            checkpoints.overdue.last_missing(reached, checkpoints.last)
    return Done()
