"""Tasks that nobody waits for: what they fail with is said in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from paramserver.errors import ParamServerError

log = structlog.get_logger("paramserver.coordinator")


def unattended(task: asyncio.Task[Any]) -> None:
    """From now on nobody waits for ``task``. Should it fail, one line of the log names it and says why."""
    task.add_done_callback(_tell)


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
