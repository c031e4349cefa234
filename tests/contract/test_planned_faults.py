"""Every network fault of a plan does what it says: what the peer hears, and what the caller hears."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from paramserver import errors, failpoints
from paramserver.frames import AnyFrame
from paramserver.testing.armed import Armed
from paramserver.testing.fired import FiredLog
from paramserver.testing.plan import Plan, parse
from paramserver.testing.processes import ProcessBook
from paramserver.transport.base import Channel
from paramserver.transport.grpc import connector
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2
from tests.support.contract.channels import WIRES, GrpcWires, Stub, Wires, run

FRAMES = [b"one", b"two", b"three"]
TIMEOUT_S = 10.0


class Peer(Stub):
    """A shard that notes what it hears: an upload counts when its end has come."""

    def __init__(self) -> None:
        super().__init__()
        self.began = 0
        self.heard: list[list[AnyFrame]] = []
        self.pulls = 0
        self.order: list[int] = []
        self.ended = asyncio.Event()

    async def push(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
        self.began += 1
        try:
            self.heard.append([frame async for frame in frames])
        finally:
            self.ended.set()
        return shard_pb2.PushResponse(version=len(self.heard))

    async def pull(self, request: shard_pb2.PullRequest) -> AsyncIterator[AnyFrame]:
        self.pulls += 1
        for frame in FRAMES:
            yield frame

    async def stats(self, request: shard_pb2.StatsRequest) -> shard_pb2.StatsResponse:
        self.order.append(int(request.job))
        return shard_pb2.StatsResponse(version=int(request.job))


def arm(plan: Plan, name: str, fired: FiredLog) -> Armed:
    return Armed(plan, name, fired, ProcessBook(fired.path.with_name("processes")))


class Line:
    """A caller "worker-0" under a plan of one fault, and its peer."""

    def __init__(self, channel: Channel, peer: Peer, fired: FiredLog) -> None:
        self.channel, self.peer, self.fired = channel, peer, fired

    async def push(self) -> int:
        reply = await self.channel.upload("Shard.Push", FRAMES, timeout=TIMEOUT_S)
        assert isinstance(reply, shard_pb2.PushResponse)
        return reply.version

    async def pull(self) -> list[AnyFrame]:
        async with aclosing(self.channel.download("Shard.Pull", shard_pb2.PullRequest(), timeout=TIMEOUT_S)) as frames:
            return [frame async for frame in frames]

    async def stats(self, number: int) -> None:
        await self.channel.call("Shard.Stats", shard_pb2.StatsRequest(job=str(number)), timeout=TIMEOUT_S)

    def struck(self, do: str) -> bool:
        """The fault has struck, once."""
        return [entry.do for entry in self.fired.read()] == [do]


async def line(wires: Wires, tmp_path: Path, text: str) -> Line:
    peer = Peer()
    _, channel = await wires.pair(("Shard", peer))
    fired = FiredLog(tmp_path / "fired")
    armed = arm(parse(f"[[fault]]\n{text}"), "worker-0", fired)
    return Line(armed.through(channel), peer, fired)


pytestmark = pytest.mark.parametrize("wires", WIRES, ids=[wires.kind for wires in WIRES])


def test_a_dropped_request_never_arrives(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Push"\ndo = "drop"')
        with pytest.raises(errors.UnavailableError, match="dropped, as planned"):
            await sut.push()
        assert sut.peer.began == 0
        assert sut.struck("drop")
        assert await sut.push() == 1  # the next one passes
        assert sut.peer.heard == [FRAMES]

    run(wires, test)


def test_a_lost_reply_is_heard_by_the_peer_only(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Push"\ndo = "lose_reply"')
        with pytest.raises(errors.UnavailableError, match="reply was lost, as planned"):
            await sut.push()
        assert sut.peer.heard == [FRAMES]
        assert sut.struck("lose_reply")
        assert await sut.push() == 2

    run(wires, test)


def test_a_lost_reply_to_a_pull_ends_after_its_first_frame(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Pull"\ndo = "lose_reply"')
        with pytest.raises(errors.UnavailableError, match="rest of the reply was lost"):
            await sut.pull()
        assert sut.peer.pulls == 1
        assert sut.struck("lose_reply")
        assert await sut.pull() == FRAMES

    run(wires, test)


def test_a_duplicated_request_arrives_twice(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Push"\ndo = "duplicate"')
        assert await sut.push() in (1, 2)
        assert sut.peer.heard == [FRAMES, FRAMES]
        assert sut.struck("duplicate")
        assert await sut.push() == 3

    run(wires, test)


def test_a_duplicated_pull_is_answered_whole(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Pull"\ndo = "duplicate"')
        assert await sut.pull() == FRAMES
        assert sut.peer.pulls == 2
        assert sut.struck("duplicate")

    run(wires, test)


def test_a_delayed_request_arrives_late(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Push"\ndo = "delay"\nseconds = 0.2')
        begun = time.monotonic()
        assert await sut.push() == 1
        assert time.monotonic() - begun >= 0.2
        assert sut.struck("delay")

    run(wires, test)


def test_a_reordered_request_is_overtaken_by_the_next_one(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Stats"\ndo = "reorder"\nseconds = 8')
        first = asyncio.create_task(sut.stats(1))
        while not sut.fired.read():
            await asyncio.sleep(0)
        await asyncio.gather(first, sut.stats(2))
        assert sut.peer.order == [2, 1]
        assert sut.struck("reorder")

    run(wires, test)


def test_a_reordered_request_that_nobody_overtakes_is_sent_in_the_end(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Stats"\ndo = "reorder"\nseconds = 0.1')
        begun = time.monotonic()
        await sut.stats(1)
        assert sut.peer.order == [1]
        assert 0.1 <= time.monotonic() - begun < 5.0

    run(wires, test)


def test_an_upload_that_is_cut_begins_and_never_ends(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        sut = await line(mine, tmp_path, 'call = "Shard.Push"\ndo = "cut"')
        with pytest.raises(errors.UnavailableError, match="cut short, as planned"):
            await sut.push()
        async with asyncio.timeout(TIMEOUT_S):
            await sut.peer.ended.wait()
        assert sut.peer.began == 1
        assert sut.peer.heard == []
        assert sut.struck("cut")
        assert await sut.push() == 1

    run(wires, test)


def test_a_session_is_reset_after_its_first_answer(wires: type[Wires], tmp_path: Path) -> None:
    async def test(mine: Wires) -> None:
        async def session(requests: object) -> AsyncIterator[coordinator_pb2.SessionResponse]:
            while True:
                yield coordinator_pb2.SessionResponse()

        _, channel = await mine.pair(("Coordinator", Stub(session=session)))
        fired = FiredLog(tmp_path / "fired")
        plan = parse('[[fault]]\ncall = "Coordinator.Session"\ndo = "lose_reply"')
        planned = arm(plan, "server-1", fired).through(channel)
        async with aclosing(planned.session("Coordinator.Session", _say_hello())) as replies:
            await anext(replies)
            with pytest.raises(errors.UnavailableError, match="session was reset"):
                await anext(replies)
        assert len(fired.read()) == 1

    run(wires, test)


async def _say_hello() -> AsyncIterator[coordinator_pb2.SessionRequest]:
    yield coordinator_pb2.SessionRequest(member=1)
    await asyncio.Event().wait()


def test_an_armed_process_connects_through_its_plan(wires: type[Wires], tmp_path: Path) -> None:
    """What `Security.connector` gives suffers; other calls, and a process without a plan, do not."""

    async def test(mine: Wires) -> None:
        server = await mine.serve(("Shard", Peer()))
        fired = FiredLog(tmp_path / "fired")
        connect = connector(Security.open(), "server") if wires is GrpcWires else mine.connect
        failpoints.arm(arm(parse('[[fault]]\ncall = "Shard.Stats"\ndo = "drop"\ntimes = 0'), "worker-0", fired))
        try:
            through = connect(server.address)
            through = through if wires is GrpcWires else failpoints.through(through)
        finally:
            failpoints.arm(None)
        plain = connect(server.address)
        request = shard_pb2.StatsRequest(job="1")
        for _ in range(3):
            with pytest.raises(errors.UnavailableError, match="as planned"):
                await through.call("Shard.Stats", request, timeout=TIMEOUT_S)
            await plain.call("Shard.Stats", request, timeout=TIMEOUT_S)
        assert len(fired.read()) == 3
        await through.close()
        await plain.close()

    run(wires, test)
