"""A worker follows views in which a shard is on another server, and knows whose memory it has."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import cast

import pytest
from google.protobuf.message import Message

from paramserver import errors
from paramserver.core.layout.plan import TensorSpec, make_layout, make_plan
from paramserver.membership.joining import JoinOptions
from paramserver.membership.session import Session
from paramserver.transport.base import Channel
from paramserver.transport.shm.segments import Segment
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
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


class Host:
    """A server with memory, at the end of a channel, that a worker attaches to."""

    kind = address = "here"

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def beside(self, sock: socket.socket) -> Host:
        sock.close()
        return self

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        return shard_pb2.AttachResponse(attachment=1, weights_bytes=self.segment.nbytes)

    async def close(self) -> None:
        """Nothing to close."""


async def attach(shared: SharedMemory, host: Host, worker: int, monkeypatch: pytest.MonkeyPatch) -> Attached:
    """Attach to the shard as this member."""

    class Meeting:
        name = "here"

        def swap(self, fd: int, take: int) -> list[int]:
            ours, theirs = socket.socketpair()
            return [os.dup(host.segment.reading_fd), ours.detach(), theirs.detach()]

        def close(self) -> None:
            """Nothing to close."""

    monkeypatch.setattr("paramserver.worker.memory.shared.Meeting", Meeting)
    channel = cast(Channel, host)
    assert await shared.attach(0, channel, "job", 1, worker, 5.0) == ""
    found = shared.attached(0, worker, channel)
    assert found is not None
    return found


def test_a_server_hears_of_its_own_slots_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all of them: it would write over weights that this worker still reads."""
    shared = SharedMemory(make_plan(make_layout([TensorSpec("w", (4096,), "float32")]), 1))
    first, second = (Host(Segment(shared.arena.weights_bytes(3))) for _ in range(2))

    async def main() -> None:
        at_first = await attach(shared, first, 1, monkeypatch)
        shared.reading[0] = Slot(at_first.weights, 2)
        assert [*shared.question(0, at_first).reading] == [2]
        # As another member, since this worker was given up for lost.
        at_first = await attach(shared, first, 5, monkeypatch)
        assert [*shared.question(0, at_first).reading] == [2]
        assert shared.outdated(0, 5, cast(Channel, second))
        at_second = await attach(shared, second, 5, monkeypatch)
        assert [*shared.question(0, at_second).reading] == []
        assert shared.attached(0, 5, cast(Channel, first)) is None
        assert not shared.outdated(0, 5, cast(Channel, second))
        await shared.close()

    asyncio.run(main())
