"""Asks the coordinator again and again for the status of the job, and notes when it answered last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from paramserver import errors
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2

POLL_S = 0.25
_CALL_S = 2.0


class Poll:
    """Calls ``Coordinator.Status`` every ``every_s`` seconds from :meth:`start` to :meth:`close`, and when told to.

    ``heard`` is given every answer of a coordinator that leads. ``request`` makes the question.
    """

    def __init__(
        self,
        channel: Channel,
        heard: Callable[[coordinator_pb2.StatusResponse], None],
        every_s: float = POLL_S,
        request: Callable[[], coordinator_pb2.StatusRequest] = coordinator_pb2.StatusRequest,
    ) -> None:
        # When a coordinator last answered, leader or not (monotonic seconds).
        self.answered_at = time.monotonic()
        self._channel = channel
        self._heard = heard
        self._every_s = every_s
        self._request = request
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(self._every_s)

    async def ask(self) -> coordinator_pb2.StatusResponse | None:
        """The status of the job; None if no coordinator that leads it answers within 2 s."""
        try:
            reply = await self._channel.call("Coordinator.Status", self._request(), timeout=_CALL_S)
        except errors.ParamServerError:
            return None
        status = cast(coordinator_pb2.StatusResponse, reply)
        self.answered_at = time.monotonic()
        if not status.term:
            return None
        self._heard(status)
        return status

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()
