"""How long a worker gives a server: as long as what has to travel takes on a slow link, and no longer than it waits.

And how a worker follows a shard to another server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from paramserver import errors
from paramserver.core.layout.plan import TensorSpec, make_layout, make_plan
from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.names import SyncName
from paramserver.tensors.codec import split_frame
from paramserver.transport.base import Channel, Place, each
from paramserver.v1 import shard_pb2
from paramserver.worker.gradients.contribution import PushFacts
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.pulls import Pull
from paramserver.worker.links.targets import Targets


class Silent:
    """Takes note of how long it may take, and says that it will never do."""

    kind, address = "memory", "here"

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    async def upload(self, method: str, frames: Any, *, timeout: float) -> Message:
        self.timeouts.append(timeout)
        raise errors.JobFailedError("never")

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[bytes, None]:
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
            links.pushes.push(sealed(facts)),
        ):
            with pytest.raises(errors.JobFailedError):
                await work
        with pytest.raises(errors.JobFailedError):
            await links.pulls.ask(Pull(AtLeast(0)))

    asyncio.run(go())
    assert server.timeouts == pytest.approx([longest_s, longest_s, longest_s + 5.0], abs=1.0)


class Counting:
    """Answers pushes, when it may, and notes their nonces."""

    kind = "memory"

    def __init__(self, address: str, outcome: shard_pb2.Outcome = shard_pb2.OUTCOME_ACCEPTED) -> None:
        self.address, self.outcome = address, outcome
        self.nonces: list[int] = []
        self.answers, self.heard = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.closed = False

    async def upload(self, method: str, frames: Any, *, timeout: float) -> Message:
        async for raw in each(frames):
            self.nonces += [header.push.nonce for header in [split_frame(raw)[0]] if header.HasField("push")]
        self.heard.set()
        await self.answers.wait()
        return shard_pb2.PushResponse(outcome=self.outcome)

    async def close(self) -> None:
        self.closed = True


PLAN = make_plan(make_layout([TensorSpec("w", (16,), "float32")]), 1)


def linked(server: Counting) -> tuple[Targets, ShardLinks]:
    targets = Targets([cast(Channel, server)], ["server-0"], PLAN, "job", lambda: 1, wait_timeout_s=20.0)
    return targets, ShardLinks(targets)


def contribution(step: int = 0, by_data: bool = True) -> PushFacts:
    name = SyncName(step, 0, 1, 2)
    return PushFacts(name, 1, False, frozenset(), (), [step], nonce=7 + step, by_data=by_data)


def sealed(facts: PushFacts) -> Leaving:
    leaving = Leaving(PLAN, facts, lambda chunk: memoryview(b""))
    leaving.seal()
    return leaving


async def turns(until: Callable[[], bool]) -> None:
    """Let others go on until this holds, and until they have had time to do more."""
    async with asyncio.timeout(5.0):
        while not until():
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)


def test_a_move_ends_the_pause_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.worker.links.targets._BACK_OFF_S", (1000.0,))

    class Gone(Counting):
        async def upload(self, method: str, frames: Any, *, timeout: float) -> Message:
            self.heard.set()
            raise errors.UnavailableError("nobody is here")

    async def main() -> None:
        gone, there = Gone("gone"), Counting("there")
        targets, links = linked(gone)
        push = asyncio.ensure_future(links.pushes.push(sealed(contribution())))
        await gone.heard.wait()
        await turns(lambda: True)
        await links.move(0, cast(Channel, there), "server-1")
        async with asyncio.timeout(5.0):
            await push
        await links.close()
        assert (gone.closed, there.closed, targets.names) == (True, True, ["server-1"])

    asyncio.run(main())


def test_the_answer_of_a_former_server_does_not_count() -> None:
    async def main() -> None:
        gone, there = Counting("gone"), Counting("there", shard_pb2.OUTCOME_DUPLICATE)
        _, links = linked(gone)
        gone.answers.clear()
        push = asyncio.ensure_future(links.pushes.push(sealed(contribution())))
        await gone.heard.wait()
        await links.move(0, cast(Channel, there), "server-1")
        gone.answers.set()
        assert await push == {shard_pb2.OUTCOME_DUPLICATE}
        assert gone.nonces == there.nonces == [7]
        await links.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("by_data", "outcome", "again"),
    [
        (True, shard_pb2.OUTCOME_ACCEPTED, [7, 8]),
        (True, shard_pb2.OUTCOME_DUPLICATE, [7, 8]),
        (False, shard_pb2.OUTCOME_ACCEPTED, [7, 8]),
        (False, shard_pb2.OUTCOME_DUPLICATE, []),
    ],
)
def test_a_shard_that_moves_gets_contributions_again(
    by_data: bool, outcome: shard_pb2.Outcome, again: list[int]
) -> None:
    """Without a data set, the script has heard that a duplicate does not count: then it must not count elsewhere."""

    async def main() -> None:
        gone, there, last = Counting("gone", outcome), Counting("there"), Counting("last")
        _, links = linked(gone)
        for step in (0, 1):
            await links.pushes.push(sealed(contribution(step, by_data)))
        await links.move(0, cast(Channel, there), "server-1")
        await turns(lambda: len(there.nonces) >= len(again))
        links.pushes.published(1)
        await links.move(0, cast(Channel, last), "server-2")
        await turns(lambda: len(last.nonces) >= len(again[1:]))
        await links.close()
        assert sorted(there.nonces) == again
        assert last.nonces == again[1:]

    asyncio.run(main())


def test_a_contribution_that_was_given_up_does_not_come_again() -> None:
    """Its memory is used for another one."""

    async def main() -> None:
        gone, there = Counting("gone"), Counting("there")
        other = Counting("other")
        plan = make_plan(make_layout([TensorSpec("v", (16,), "float32"), TensorSpec("w", (16,), "float32")], 64), 2)
        channels = [cast(Channel, gone), cast(Channel, other)]
        links = ShardLinks(Targets(channels, ["server-0", "server-1"], plan, "job", lambda: 2))
        other.answers.clear()
        push = asyncio.ensure_future(links.pushes.push(sealed(replace(contribution(), base_versions=[0, 0]))))
        await other.heard.wait()
        await turns(lambda: bool(gone.nonces))
        push.cancel()
        await asyncio.wait([push])
        await links.move(0, cast(Channel, there), "server-2")
        await turns(lambda: True)
        await links.close()
        assert there.nonces == []

    asyncio.run(main())


def test_what_the_thread_that_trains_has_brought_comes_again_if_the_shard_has_moved_meanwhile() -> None:
    async def main() -> None:
        gone, there, last = Counting("gone"), Counting("there"), Counting("last")
        _, links = linked(gone)
        channels = [*links.channels]
        await links.move(0, cast(Channel, there), "server-1")
        await links.pushes.exchanged(sealed(contribution()), channels)
        await turns(lambda: there.nonces == [7])
        await links.pushes.exchanged(sealed(contribution(1)), [*links.channels])
        await links.move(0, cast(Channel, last), "server-2")
        await turns(lambda: sorted(last.nonces) == [7, 8])
        await links.close()

    asyncio.run(main())


def test_an_idle_worker_says_so_again_until_it_asks_at_a_clock() -> None:
    class Heard(Counting):
        async def call(self, method: str, request: Message, *, timeout: float) -> Message:
            self.heard.set()
            return shard_pb2.IdleResponse()

    async def main() -> None:
        first, second, third = Heard("first"), Heard("second"), Heard("third")
        _, links = linked(first)
        await links.questions.idle()
        await links.move(0, cast(Channel, second), "server-1")
        await links.questions.at_work()
        assert second.heard.is_set(), "before anything is asked at a clock"
        await links.move(0, cast(Channel, third), "server-2")
        await turns(lambda: True)
        await links.close()
        assert not third.heard.is_set()

    asyncio.run(main())
