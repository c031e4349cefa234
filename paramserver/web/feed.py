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
from paramserver.web.models import Event, Events, Series, Status

# How often the job is looked at: while nobody watches, and while somebody does.
IDLE_S = 1.0
WATCHED_S = 0.5
# Looks take at most this part of a core. In a job of many workers there are fewer looks.
MAX_SHARE = 0.01
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
        # The run has ended, and its last state is known: nothing changes any more.
        self._over = False
        self._watching = 0
        # The status as JSON; empty if nobody watched at that time. CPU seconds of the last look.
        self._text = ""
        self._cost_s = 0.0
        self._events: list[Event] = []
        self._at_s = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not (self._closing or self._over):
            cost_s = 0.0
            try:
                await self.look()
                cost_s = self._cost_s
            except errors.ParamServerError as error:
                log.debug("the job cannot be looked at now", reason=str(error))
            await asyncio.sleep(pause(cost_s, bool(self._watching)))

    async def look(self) -> Status:
        """Ask for the state of the job now."""
        began = time.thread_time()
        response = await self._ask(coordinator_pb2.StatusRequest(events=True))
        status = status_of(response)
        self._over = self._over or bool(status.said)
        self._text = status.model_dump_json() if self._watching else ""
        # Whatever else this thread did meanwhile counts as well: then there are fewer looks.
        self._cost_s = time.thread_time() - began
        self._events, self._at_s = events_of(response), time.time()
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

    async def updates(self) -> AsyncIterator[str]:
        """`models.Update` as JSON, now, and again after each look; ends with the run, the process, or after an hour."""
        deadline = time.monotonic() + MAX_STREAM_S
        self._watching += 1
        try:
            if not self._text:
                await self.look()
            known: set[Event] = set()
            while time.monotonic() < deadline:
                fresh = [event for event in self._events if event not in known]
                known = set(self._events)
                edition, over = self._edition, self._over
                events = Events(events=fresh).model_dump_json().removeprefix("{")
                # The status is the same text for all who watch.
                yield f'{{"status":{self._text},"at_s":{self._at_s},{events}'
                if over or not await self._next(edition):
                    return
        finally:
            self._watching -= 1

    async def _next(self, edition: int) -> bool:
        """Wait for a newer look; False: there will be none. The last look before the end is not left out."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._edition != edition or self._closing)
            return self._edition != edition

    async def close(self) -> None:
        """Look no more, and end all streams."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        async with self._changed:
            self._changed.notify_all()


def pause(cost_s: float, watched: bool) -> float:
    """Seconds until the next look, if the last one took so many CPU seconds."""
    return max(WATCHED_S if watched else IDLE_S, cost_s / MAX_SHARE)
