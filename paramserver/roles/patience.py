"""Work that is tried again for a while, and work that is not to be interrupted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from paramserver import errors

log = structlog.get_logger("paramserver.coordinator")
T = TypeVar("T")

_RETRY_S = 0.5


async def persist(attempt: Callable[[float], Awaitable[T]], patience_s: float, problem: str) -> T:
    """The result of the first attempt that works; each is given the seconds left.

    Raises the RetryableError of the first attempt that fails after ``patience_s``, and any other error at once.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await attempt(deadline - time.monotonic())
        except errors.RetryableError as error:
            if time.monotonic() >= deadline:
                raise
            log.warning(f"{problem}; trying again: {error}")
            await asyncio.sleep(_RETRY_S)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to its end, also if the caller is cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
