"""The event loop in a thread of its own: its end leaves no task behind."""

from __future__ import annotations

import asyncio
import os

import pytest

from paramserver import errors
from paramserver.worker.background import Background


def test_a_task_that_begins_while_the_loop_ends_is_cancelled_like_the_others() -> None:
    background = Background()
    begun: list[asyncio.Task[None]] = []

    async def rest() -> None:
        await asyncio.sleep(60.0)

    async def first() -> None:
        try:
            await rest()
        finally:
            begun.append(asyncio.get_running_loop().create_task(rest()))

    async def begin() -> None:
        begun.append(asyncio.get_running_loop().create_task(first()))
        await asyncio.sleep(0)  # it runs to its wait

    background.run(begin(), 10.0)
    background.close()
    assert [task.cancelled() for task in begun] == [True, True]
    assert background.loop.is_closed()


def test_a_process_that_was_forked_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the loop is in the other process. Before, `ctx.close()` in a child of the script never returned."""
    background = Background()
    own = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        assert background.elsewhere
        with pytest.raises(errors.UserError, match=f"this process {own + 1} was forked from {own}, and is no member"):
            background.run(asyncio.sleep(0))
        background.close()
    background.run(asyncio.sleep(0), 10.0)
    background.close()
    assert background.loop.is_closed()
