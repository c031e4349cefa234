"""A task that nobody waits for and that fails is a line of the log, not asyncio's complaint at some later time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from paramserver.coordinator.tasks import unattended
from paramserver.errors import ConfigError


async def fail(error: Exception) -> None:
    raise error


def told(error: Exception | None) -> tuple[list[tuple[str, str]], list[str]]:
    """(level and text of each line of the log, what asyncio complains of) when a task ends so; None: cancelled."""
    complaints: list[str] = []

    def complain(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        complaints.append(context["message"])

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(complain)
        task = asyncio.create_task(asyncio.sleep(60) if error is None else fail(error))
        unattended(task)
        if error is None:
            task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()

    with capture_logs() as lines:
        asyncio.run(go())
    return [(line["log_level"], line["event"]) for line in lines], complaints


@pytest.mark.parametrize(
    ("error", "level", "why"),
    [(ConfigError("leave it out"), "warning", "leave it out"), (KeyError(), "error", "KeyError")],
)
def test_a_failure_is_one_sentence(error: Exception, level: str, why: str) -> None:
    assert told(error) == ([(level, f"fail failed, and nobody waited for it: {why}")], [])


def test_a_task_that_is_cancelled_has_not_failed() -> None:
    assert told(None) == ([], [])
