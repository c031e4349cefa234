"""Changes of a job, counted: sessions, commands and roles wait here for the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paramserver import errors


class Changes:
    """Counts the changes of one job; each count is an *edition* of the view that members get."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._edition = 0
        self._closing = False

    async def notify(self) -> None:
        """Something has changed: wake all who wait."""
        async with self._changed:
            self._edition += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """Let nobody wait any longer: this coordinator ends."""
        self._closing = True
        await self.notify()

    async def wait_edition(self, seen: int) -> int:
        """Wait until the edition is another than ``seen``, and return it. Raises NotLeaderError after :meth:`close`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._edition != seen or self._closing)
            if self._edition == seen:  # a member that stays here would never hear of another coordinator
                raise errors.NotLeaderError("this coordinator ends: the job is over, or another coordinator leads it")
            return self._edition

    async def wait(self, deadline: float) -> bool:
        """Wait for the next change until ``deadline`` (monotonic seconds); False when that has passed."""
        try:
            async with asyncio.timeout_at(deadline - time.monotonic() + asyncio.get_running_loop().time()):
                await self.wait_edition(self._edition)
        except TimeoutError:
            return False
        return True

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a change after which ``ready()`` is true; False after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not await self.wait(deadline):
                return ready()
        return True
