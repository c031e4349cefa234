"""What a worker does at its start while the job goes back to a checkpoint."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from paramserver import errors
from paramserver.membership.session import Session
from paramserver.v1 import types_pb2
from paramserver.worker.links import ShardLinks
from paramserver.worker.startup import _on_this_timeline


class World:
    """As much of a session, and of links to servers, as is asked for."""

    def __init__(self) -> None:
        self.timeline = 0
        self.view = types_pb2.View(state=types_pb2.JOB_STATE_RUNNING)
        self.editions = 0
        self.ended: list[str] = []
        self._news = asyncio.Condition()

    def check(self) -> types_pb2.View:
        return self.view

    async def changed(self, seen: int) -> int:
        async with self._news:
            await self._news.wait_for(lambda: self.editions != seen)
            return self.editions

    async def tell(self, **changes: int) -> None:
        async with self._news:
            self.view.MergeFrom(types_pb2.View(**changes))  # type: ignore[arg-type]
            self.editions += 1
            self._news.notify_all()

    async def nobody_answers(self) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("cancelled")
        return 0

    async def run(self, news: dict[str, int]) -> int:
        """Wait for a server that never answers, while this news arrives."""
        waiting = asyncio.ensure_future(
            _on_this_timeline(cast(Session, self), cast(ShardLinks, self), self.nobody_answers())
        )
        await asyncio.sleep(0)
        await self.tell(generation=3)  # no matter
        await asyncio.sleep(0)
        assert not waiting.done()
        await self.tell(**news)
        async with asyncio.timeout(5.0):
            return await waiting


@pytest.mark.parametrize("news", [{"timeline": 1}, {"state": types_pb2.JOB_STATE_RECOVERING}])
def test_whoever_waits_for_a_server_that_was_lost_follows_the_job(news: dict[str, int]) -> None:
    """Its successor has another address, so nobody would ever answer."""

    async def main() -> None:
        world = World()
        with pytest.raises(errors.RolledBackError):
            await world.run(news)
        assert world.ended == ["cancelled"]

    asyncio.run(main())


def test_an_answer_is_passed_on_and_so_is_an_error() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> int:
        raise errors.DeadlineError("too late")

    async def main() -> None:
        world = World()
        links, session = cast(ShardLinks, world), cast(Session, world)
        assert await _on_this_timeline(session, links, answer()) == 7
        with pytest.raises(errors.DeadlineError):
            await _on_this_timeline(session, links, fail())

    asyncio.run(main())
