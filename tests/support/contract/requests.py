"""Requests of each kind, for the tests of the transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from paramserver.frames import AnyFrame
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, shard_pb2
from tests.support.contract.channels import DEADLINE_S

STATUS = "Coordinator.Status"
PUSH = "Shard.Push"
PULL = "Shard.Pull"
SESSION = "Coordinator.Session"
T = DEADLINE_S
ASK = coordinator_pb2.StatusRequest(model=True)
WANT = shard_pb2.PullRequest(job="j")
MIB = 2**20


async def silence() -> AsyncIterator[coordinator_pb2.SessionRequest]:
    await asyncio.Event().wait()
    yield coordinator_pb2.SessionRequest()


async def collect(channel: Channel, method: str = PULL) -> list[AnyFrame]:
    return [frame async for frame in channel.download(method, WANT, timeout=T)]


async def one_of_each(channel: Channel) -> list[Callable[[], Any]]:
    """A call of each kind, as something to await."""

    async def talk() -> list[Any]:
        return [reply async for reply in channel.session(SESSION, silence())]

    return [
        lambda: channel.call(STATUS, ASK, timeout=T),
        lambda: channel.upload(PUSH, [b"frame"], timeout=T),
        lambda: collect(channel),
        talk,
    ]


def reporting(ended: asyncio.Queue[str], arrived: asyncio.Event) -> Callable[..., Any]:
    """A push that says how its stream of frames ended."""

    async def push(frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
        try:
            async for _ in frames:
                arrived.set()
            ended.put_nowait("normally")
        except BaseException as error:
            ended.put_nowait(type(error).__name__)
            raise
        return shard_pb2.PushResponse()

    return push
