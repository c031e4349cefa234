"""Tasks beside calls: all of them end, whatever they begin when they are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from paramserver.coordinator import tasks
from paramserver.coordinator.tasks import Tasks


def test_a_task_that_never_comes_to_an_end_cleaning_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CLEANING_S", 0.1)
    cleaned = asyncio.Event()

    async def clean(seconds: float) -> None:
        await asyncio.sleep(seconds)
        cleaned.set()
        await asyncio.Event().wait()

    async def work(own: Tasks) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(own.begin(clean(0.01), awaited=True))

    async def go() -> asyncio.Task[None]:
        own = Tasks()
        task = own.begin(work(own), awaited=True)
        await asyncio.sleep(0)
        async with asyncio.timeout(5.0):
            await own.close()
        return task

    task = asyncio.run(go())
    assert cleaned.is_set(), "what a task begins to clean up has some time"
    assert task.done()


def test_cancelled_tasks_end_at_once() -> None:
    async def go() -> float:
        own = Tasks()
        own.begin(asyncio.sleep(60.0), awaited=True)
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await own.close()
        return loop.time() - began

    assert asyncio.run(go()) < 1.0
