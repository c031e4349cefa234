"""A worker follows views in which a shard is on another server, and knows whose memory it has."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramserver import errors
from paramserver.core.layout.plan import TensorSpec, make_layout, make_plan
from paramserver.membership.session import JoinOptions, Session
from paramserver.transport.base import Channel
from paramserver.transport.shm.segments import Foreign, Segment
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.job.member import Member
from paramserver.worker.job.moves import Moves
from paramserver.worker.links import ShardLinks
from paramserver.worker.memory.shared import Attached, SharedMemory
from paramserver.worker.weights.pulled import Slot


def view(placement: int, *addresses: str, timeline: int = 1) -> types_pb2.View:
    """Shard *i* is at the address *i*; empty: it has no server."""
    shards = [
        types_pb2.ShardInfo(index=index, address=address, server=f"server at {address}")
        for index, address in enumerate(addresses)
        if address
    ]
    return types_pb2.View(timeline=timeline, placement=placement, shards=shards)


class World:
    """As much of a member and of links as is asked for."""

    timeline = 1

    def __init__(self) -> None:
        self.session = self
        self.view, self.editions = view(3, "a", "b"), 0
        self.moved: list[tuple[int, str, str]] = []
        self._news = asyncio.Condition()

    async def changed(self, seen: int) -> int:
        async with self._news:
            await self._news.wait_for(lambda: self.editions != seen)
            return self.editions

    async def move(self, shard: int, channel: Channel, name: str) -> None:
        self.moved.append((shard, channel.address, name))

    def connect(self, address: str) -> Channel:
        if address == "nowhere":
            raise errors.ConfigError("nowhere is no address")
        return cast(Channel, SimpleNamespace(address=address))

    async def tell(self, news: types_pb2.View) -> list[tuple[int, str, str]]:
        """What has moved when these news have come."""
        self.moved.clear()
        async with self._news:
            self.view, self.editions = news, self.editions + 1
            self._news.notify_all()
        for _ in range(20):
            await asyncio.sleep(0)
        return [*self.moved]


def test_views_are_followed() -> None:
    async def main() -> None:
        world = World()
        links = cast(ShardLinks, world)
        following = asyncio.ensure_future(Moves(cast(Member, world), links, world.connect, world.view).follow())
        assert await world.tell(view(3, "a", "b")) == []
        assert await world.tell(view(4, "a", "c")) == [(1, "c", "server at c")]
        assert await world.tell(view(5, "", "c")) == [], "nobody has shard 0 yet"
        assert await world.tell(view(4, "x", "b")) == [], "an older placement"
        assert await world.tell(view(6, "x", "y", timeline=2)) == [], "another timeline has links of its own"
        assert await world.tell(view(7, "nowhere", "d")) == [(1, "d", "server at d")]
        assert await world.tell(view(8, "b", "a")) == [(0, "b", "server at b"), (1, "a", "server at a")]
        following.cancel()

    asyncio.run(main())


def test_who_waits_for_a_view_hears_that_the_session_is_over() -> None:
    """An observer that becomes a worker has another session then."""

    async def main() -> None:
        options = JoinOptions(role=types_pb2.ROLE_OBSERVER, job="job")
        session = Session(cast(Channel, None), options, coordinator_pb2.SessionRequest)
        waiting = asyncio.ensure_future(session.changed(session.editions))
        await asyncio.sleep(0)
        await session.leave()
        async with asyncio.timeout(5.0):
            await waiting

    asyncio.run(main())


@pytest.fixture
def shared() -> SharedMemory:
    return SharedMemory(make_plan(make_layout([TensorSpec("w", (4096,), "float32")]), 1))


def attached(number: int, segment: Segment) -> Attached:
    anything = cast(Any, None)
    return Attached(number, 1, anything, Foreign(os.dup(segment.reading_fd), segment.nbytes), anything, anything)


def test_a_server_hears_of_its_own_slots_only(shared: SharedMemory) -> None:
    first, second = attached(1, Segment(8192)), attached(1, Segment(8192))
    shared.reading[0] = Slot(first.weights, 2)
    assert [*shared.question(0, first).reading] == [2]
    assert [*shared.question(0, second).reading] == []
