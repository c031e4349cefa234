"""A process that lends memory as a primary does, writes to it, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from paramserver.core.layout.plan import TensorSpec, make_layout, make_plan
from paramserver.server.replicas.outbox import Outbox
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2

PLAN = make_plan(make_layout([TensorSpec("w", (3000,), "float32")], 4096), 1)
CHUNKS = {chunk.index: chunk for chunk in PLAN.chunks_of(0)}


def value(chunk: int) -> float:
    """Of each number there."""
    return chunk + 1.0


async def nobody() -> None:
    """Nobody reads the memory."""


class Parent:
    """A channel to the process at the other end of the pipes, which takes the memory."""

    address = "parent"

    async def call(self, method: str, request: shard_pb2.LendRequest, *, timeout: float) -> shard_pb2.LendResponse:
        """Give the request, and wait for a line."""
        print(request.SerializeToString().hex(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        return shard_pb2.LendResponse()

    def beside(self, sock: Any) -> Any:
        """No call is made."""
        self.sock = sock
        return sock


async def lend() -> None:
    outbox = Outbox(PLAN, 0)
    loan = await outbox.lend(cast(Channel, Parent()), "job", 0, 0)
    assert loan is not None
    content = outbox.content(nobody)
    assert content.lent
    for chunk in CHUNKS.values():
        content(chunk).fill_(value(chunk.index))
    print("written", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(lend())
