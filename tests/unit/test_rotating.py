"""One channel to whichever coordinator leads: the next address after a failure, the same one otherwise."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport.base import Frames, Neighbour, Place
from paramserver.transport.rotating import RotatingChannel, coordinator_channel
from paramserver.v1 import coordinator_pb2


class Fake:
    """A coordinator at an address: answers, or raises."""

    kind = "fake"

    def __init__(self, address: str) -> None:
        self.address = address
        self.error: Exception | None = None
        self.asked = 0
        self.closed = False

    def _answer(self) -> Message:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return coordinator_pb2.StatusResponse(job=self.address)

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        await asyncio.sleep(0)
        return self._answer()

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        return self._answer()

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        self._answer()
        yield self.address.encode()

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        yield coordinator_pb2.SessionResponse()
        yield self._answer()

    def beside(self, sock: socket.socket) -> Neighbour:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def fakes() -> dict[str, Fake]:
    return {name: Fake(name) for name in ("a:1", "b:1", "c:1")}


def ask(channel: RotatingChannel) -> str:
    reply = asyncio.run(channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=1.0))
    assert isinstance(reply, coordinator_pb2.StatusResponse)
    return reply.job


def rotating(fakes: dict[str, Fake]) -> RotatingChannel:
    return RotatingChannel(list(fakes), lambda address: fakes[address])


def test_it_stays_where_it_is_answered(fakes: dict[str, Fake]) -> None:
    channel = rotating(fakes)
    assert [ask(channel) for _ in range(3)] == ["a:1"] * 3
    assert (channel.address, channel.kind) == ("a:1", "fake")


@pytest.mark.parametrize("error", [errors.UnavailableError("gone"), errors.NotLeaderError("stands by")])
def test_the_next_call_goes_to_the_next_address(fakes: dict[str, Fake], error: Exception) -> None:
    """The failure itself is the caller's to see: only it knows whether to repeat what it asked."""
    channel = rotating(fakes)
    fakes["a:1"].error = fakes["b:1"].error = error
    for address in ("a:1", "b:1"):
        assert channel.address == address
        with pytest.raises(type(error)):
            ask(channel)
    assert ask(channel) == "c:1"
    assert (fakes["a:1"].asked, fakes["b:1"].asked) == (1, 1)


def test_after_the_last_comes_the_first(fakes: dict[str, Fake]) -> None:
    channel = rotating(fakes)
    for fake in fakes.values():
        fake.error = errors.UnavailableError("gone")
    for _ in range(3):
        with pytest.raises(errors.UnavailableError):
            ask(channel)
    fakes["a:1"].error = None
    assert ask(channel) == "a:1"


@pytest.mark.parametrize("error", [errors.FencedError("old"), errors.DeadlineError("slow"), errors.ConfigError("no")])
def test_an_answer_is_an_answer(fakes: dict[str, Fake], error: Exception) -> None:
    """A coordinator that refuses is there."""
    channel = rotating(fakes)
    fakes["a:1"].error = error
    with pytest.raises(type(error)):
        ask(channel)
    assert channel.address == "a:1"


def test_calls_that_fail_together_move_on_once(fakes: dict[str, Fake]) -> None:
    """Else two failures would lead back to where they came from."""
    channel = RotatingChannel(["a:1", "b:1"], lambda address: fakes[address])
    fakes["a:1"].error = errors.UnavailableError("gone")

    async def both() -> list[Message | BaseException]:
        calls = (channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=1.0) for _ in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(reply) for reply in asyncio.run(both())] == [errors.UnavailableError] * 2
    assert fakes["a:1"].asked == 2
    assert channel.address == "b:1"


def test_a_session_that_breaks_moves_on_too(fakes: dict[str, Fake]) -> None:
    channel = rotating(fakes)
    fakes["a:1"].error = errors.UnavailableError("gone")

    async def nothing() -> AsyncIterator[Message]:
        return
        yield

    async def listen() -> int:
        heard = 0
        async for _ in channel.session("Coordinator.Session", nothing()):
            heard += 1
        return heard

    with pytest.raises(errors.UnavailableError):
        asyncio.run(listen())
    assert channel.address == "b:1"
    assert asyncio.run(listen()) == 2


def test_the_other_kinds_of_calls(fakes: dict[str, Fake]) -> None:
    channel = rotating(fakes)
    fakes["a:1"].error = errors.UnavailableError("gone")

    async def go() -> list[AnyFrame]:
        with pytest.raises(errors.UnavailableError):
            await channel.upload("Shard.Push", [b""], timeout=1.0)
        assert channel.address == "b:1"
        return [frame async for frame in channel.download("Shard.Pull", coordinator_pb2.StatusRequest(), timeout=1.0)]

    assert asyncio.run(go()) == [b"b:1"]


def test_closing_closes_all(fakes: dict[str, Fake]) -> None:
    asyncio.run(rotating(fakes).close())
    assert all(fake.closed for fake in fakes.values())


def test_one_address_needs_no_rotation(fakes: dict[str, Fake]) -> None:
    assert coordinator_channel(["a:1"], lambda address: fakes[address]) is fakes["a:1"]
    assert isinstance(coordinator_channel(["a:1", "b:1"], lambda address: fakes[address]), RotatingChannel)
