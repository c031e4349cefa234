"""How long a worker gives a server: as long as what has to travel takes on a slow link, and no longer than it waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from paramserver import errors
from paramserver.core.layout.plan import TensorSpec, make_layout, make_plan
from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.names import SyncName
from paramserver.transport.base import Channel
from paramserver.worker.gradients.contribution import PushFacts
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.targets import Targets


class Silent:
    """Takes note of how long it may take, and says that it will never do."""

    kind, address = "memory", "here"

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    async def upload(self, method: str, frames: Any, *, timeout: float) -> Message:
        self.timeouts.append(timeout)
        raise errors.JobFailedError("never")

    async def download(self, method: str, request: Message, *, timeout: float) -> AsyncGenerator[bytes, None]:
        self.timeouts.append(timeout)
        yield await self._never()

    async def _never(self) -> bytes:
        raise errors.JobFailedError("never")


@pytest.mark.parametrize(
    ("elements", "wait_s", "longest_s"),
    [
        (16, 600.0, 60.0),
        (1_000_000, 600.0, 60.0 + 32.0),
        (1_000_000_000, 600.0, 600.0),
        (1_000_000_000, 5000.0, 5000.0),
    ],
)
def test_what_is_large_may_take_long(elements: int, wait_s: float, longest_s: float) -> None:
    plan = make_plan(make_layout([TensorSpec("w", (elements,), "float32")]), 1)
    server = Silent()
    targets = Targets([cast(Channel, server)], ["server-0"], plan, "job", lambda: 1, wait_timeout_s=wait_s)
    links = ShardLinks(targets)
    facts = PushFacts(SyncName(0, 0, 1, 1), 1, False, frozenset({0}), (), [0])

    async def go() -> None:
        for work in (
            links.pushes.initialize(1, lambda chunk: memoryview(b""), lambda chunks: []),
            links.pushes.push(facts, lambda chunk: memoryview(b"")),
        ):
            with pytest.raises(errors.JobFailedError):
                await work
        with pytest.raises(errors.JobFailedError):
            await links.pulls.pull(AtLeast(0))

    asyncio.run(go())
    assert server.timeouts == pytest.approx([longest_s, longest_s, longest_s + 5.0], abs=1.0)
