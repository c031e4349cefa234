"""Looks at the job again and again, keeps its series, and wakes those who watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from paramserver import errors
from paramserver.v1 import coordinator_pb2
from paramserver.web.facts import events_of, status_of
from paramserver.web.history import History
from paramserver.web.models import Event, Series, Status, Update

# How often the job is looked at: while nobody watches, and while somebody does.
IDLE_S = 1.0
WATCHED_S = 0.5
# A stream ends after this time. The page then opens another one.
MAX_STREAM_S = 3600.0

log = structlog.get_logger("paramserver.web")

Ask = Callable[[coordinator_pb2.StatusRequest], Awaitable[coordinator_pb2.StatusResponse]]


class Feed:
    """The newest state of the job. ``ask`` gets it from the coordinator of this process."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._history = History()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._edition = 0
        self._closing = False
        self._watching = 0
        self._status: Status | None = None
        self._events: list[Event] = []
        self._at_s = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._closing:
            try:
                await self.look()
            except errors.ParamServerError as error:
                log.debug("the job cannot be looked at now", reason=str(error))
            await asyncio.sleep(WATCHED_S if self._watching else IDLE_S)

    async def look(self) -> Status:
        """Ask for the state of the job now."""
        response = await self._ask(coordinator_pb2.StatusRequest(events=True))
        status = status_of(response)
        self._status, self._events, self._at_s = status, events_of(response), time.time()
        if response.term:  # otherwise another coordinator leads the job, and this one knows nothing of it
            self._history.take(status, self._at_s)
        async with self._changed:
            self._edition += 1
            self._changed.notify_all()
        return status

    @property
    def watching(self) -> int:
        """How many streams are open."""
        return self._watching

    async def status(self) -> Status:
        """The state of the job now, which is not the newest moment of the series."""
        return status_of(await self._ask(coordinator_pb2.StatusRequest()))

    async def events(self) -> list[Event]:
        """The newest events, oldest first."""
        return events_of(await self._ask(coordinator_pb2.StatusRequest(events=True)))

    def series(self) -> Series:
        """Values over time."""
        return self._history.series()

    async def updates(self) -> AsyncIterator[Update]:
        """The newest state now, and again after each look; ends with the process, or after an hour."""
        deadline = time.monotonic() + MAX_STREAM_S
        self._watching += 1
        try:
            if self._status is None:
                await self.look()
            known: set[Event] = set()
            while not self._closing and time.monotonic() < deadline:
                assert self._status is not None
                fresh = [event for event in self._events if event not in known]
                known = set(self._events)
                edition = self._edition
                yield Update(status=self._status, at_s=self._at_s, events=fresh)
                await self._next(edition)
        finally:
            self._watching -= 1

    async def _next(self, edition: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._edition != edition or self._closing)

    async def close(self) -> None:
        """Look no more, and end all streams."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        async with self._changed:
            self._changed.notify_all()
