"""Servers keep the job's record, too: a coordinator that has lost its store goes on from what they were told.

The newest record only, told in the background to every server that has its part of the model.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from paramserver.core.job.membership import Role

if TYPE_CHECKING:
    from paramserver.coordinator.job import Job

_RETRY_S = 0.5
_SETTLE_S = 2.0
_LOOK_S = 0.01


class Keeping:
    """Which server has heard of which edition of the record."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # By member number.
        self._told: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None

    def told(self, members: list[int], edition: int) -> None:
        """These servers have the record of this edition."""
        for ident in members:
            self._told[ident] = max(edition, self._told.get(ident, 0))

    def wake(self) -> None:
        """There is a newer record, perhaps."""
        if self._behind() and (self._task is None or self._task.done()):
            self._task = self._job.loosely(self._tell())

    def _behind(self) -> bool:
        """Whether some server lacks the newest record. A server that is set up anew hears of it with that."""
        job = self._job
        if not job.registry.configured or job.recovery.under_way or job.given_up:
            return False
        edition = job.journal.edition
        return any(self._told.get(server.ident, 0) < edition for server in job.members.of(Role.SERVER))

    async def _tell(self) -> None:
        while self._behind():
            if not await self._job.tell_members():
                await asyncio.sleep(_RETRY_S)

    async def settled(self) -> None:
        """Wait until all servers have what was recorded last; 2 s at most, since one may be away."""
        deadline = time.monotonic() + _SETTLE_S
        while self._behind() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
