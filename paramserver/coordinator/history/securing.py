"""When a version is safe: in a complete checkpoint, also if several attempts are needed for that."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint.manifest import COPIES_KEPT
from paramserver.coordinator import ports
from paramserver.coordinator.history.overdue import Overdue
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")

_LOOK_S = 0.02
_RETRY_S = 0.2


class _Checkpoints(Protocol):
    """See `coordinator.history.checkpoints`."""

    last: str
    overdue: Overdue

    def check(self, timeline: int) -> None: ...

    def safe(self, version: int) -> bool: ...

    def given_up(self) -> list[int]: ...

    def try_again(self, version: int) -> None: ...

    async def cut(self) -> int: ...

    async def wait_settled(self, version: int) -> bool: ...

    async def sweep(self, version: int) -> None: ...


class Securing:
    """Makes checkpoints until a version is in one, or cannot be."""

    def __init__(self, job: ports.Commands, checkpoints: _Checkpoints) -> None:
        self._job, self._checkpoints = job, checkpoints
        # By version that was given up: for how many seconds it may be tried again. Some server had no room for another
        # copy, or the mode changed meanwhile.
        self._again: dict[int, float] = {}

    def may_again(self, version: int, seconds: float) -> None:
        """The checkpoint of this version fails for a reason that passes: it may be tried again for so long."""
        self._again[version] = seconds

    def forget(self) -> None:
        """The job is on another timeline."""
        self._again.clear()

    async def make_safe(self, version: int) -> None:
        """Return when a checkpoint of ``version`` or a later one is complete, or cannot be had.

        Raises RolledBackError if the job goes back to an earlier one meanwhile.
        """
        checkpoints, timeline, begun = self._checkpoints, self._job.timeline, time.monotonic()
        while True:
            checkpoints.check(timeline)
            if checkpoints.safe(version):
                return
            try:
                if not await self._room():
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
            if time.monotonic() - begun < self._again.pop(reached, 0.0):
                checkpoints.try_again(reached)
                await asyncio.sleep(_LOOK_S)
            elif reached >= version:
                for missing in checkpoints.given_up():
                    await checkpoints.sweep(missing)
                checkpoints.overdue.last_missing(reached, checkpoints.last)
                return

    async def _room(self) -> bool:
        """Whether no server would skip a copy now. A copy that one of them has already is waited for."""
        writing = [
            sum(copy.state != shard_pb2.COPY_STATE_SKIPPED for copy in reply.copies)
            for reply in await self._job.server_stats()
        ]
        return max(writing, default=COPIES_KEPT) < COPIES_KEPT  # no answer at all: not now
