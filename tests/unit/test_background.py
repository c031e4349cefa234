"""The event loop in a thread of its own: its end leaves no task behind."""

from __future__ import annotations

import asyncio

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
