"""Tasks beside the calls of members. If a task that nobody waits for fails, a line of the log says why."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from paramserver.errors import ParamServerError

log = structlog.get_logger("paramserver.coordinator")

T = TypeVar("T")

_CLEANING_S = 2.0


class Tasks:
    """Tasks that go on although the call that began them has ended; :meth:`close` ends all of them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T], awaited: bool = False) -> asyncio.Task[T]:
        """Begin a task. ``awaited``: the caller waits for it and gets its error, so the log does not name the error.

        The caller may be cancelled meanwhile. Then nobody hears of the error, and an error of ours is no traceback.
        """
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(_heard if awaited else _tell)
        return task

    async def close(self) -> None:
        """Cancel all tasks. What they begin meanwhile, to clean up, may take 2 s."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLEANING_S
        self._cancel()
        while self._running and (left_s := deadline - loop.time()) > 0:
            await asyncio.wait(list(self._running), timeout=left_s)
        running = self._cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _cancel(self) -> list[asyncio.Task[Any]]:
        running = list(self._running)
        for task in running:
            task.cancel()
        return running


def unattended(task: asyncio.Task[Any]) -> None:
    """From now on nobody waits for ``task``. If it fails, one line of the log names it and says why."""
    task.add_done_callback(_tell)


def _heard(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, ParamServerError):
        _tell(task)


def _tell(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    name = getattr(task.get_coro(), "__qualname__", "a task")
    sentence = f"{name} failed, and nobody waited for it: {str(error) or type(error).__name__}"
    if isinstance(error, ParamServerError):
        log.warning(sentence)
    else:
        log.error(sentence, exc_info=error)
