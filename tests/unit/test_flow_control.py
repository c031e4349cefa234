"""Chunks of a contribution that go to one server after the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from paramserver.v1 import shard_pb2
from paramserver.worker.gradients.flow_control import Flow, FlowControl

SIZE = 10


async def frames(chunks: int, size: int = SIZE) -> AsyncIterator[bytes]:
    yield b"header"
    for _ in range(chunks):
        yield bytes(size)


class Wire:
    """Takes what it is given, and writes down to whom it went."""

    def __init__(self, flow: Flow, servers: int, chunks: int, size: int = SIZE) -> None:
        self.order: list[int] = []
        self.flow, self.size = flow, size
        self.tasks = [asyncio.create_task(self._take(server, chunks)) for server in range(servers)]

    async def _take(self, server: int, chunks: int) -> None:
        async with aclosing(self.flow.keep(server, frames(chunks, self.size))) as leaving:
            async for frame in leaving:
                if len(frame) == self.size:
                    self.order.append(server)

    async def settle(self) -> list[int]:
        """All that has left once nothing moves any more."""
        for _ in range(50):
            await asyncio.sleep(0)
        return self.order


def test_one_server_after_the_other_and_not_more_than_the_window() -> None:
    async def main() -> None:
        flow = Flow([4 * SIZE] * 3, 1, 3 * SIZE, lambda: True, patience_s=1e6)
        wire = Wire(flow, 3, 4)
        assert await wire.settle() == [1, 2, 0]
        flow.acknowledged(2, 1)
        assert await wire.settle() == [1, 2, 0, 1]
        flow.acknowledged(1, 2)
        assert await wire.settle() == [1, 2, 0, 1, 2, 0]
        flow.acknowledged(1, 2)  # nothing new
        assert len(await wire.settle()) == 6
        for done in (2, 3, 4):
            for server in range(3):
                flow.acknowledged(server, done)
        await wire.settle()
        await asyncio.gather(*wire.tasks)
        assert sorted(wire.order) == sorted([0, 1, 2] * 4)

    asyncio.run(main())


def test_who_takes_more_has_more_turns() -> None:
    async def main() -> None:
        flow = Flow([6 * SIZE, 2 * SIZE], 0, 2 * SIZE, lambda: True, patience_s=1e6)
        big, small = Wire(flow, 1, 6), asyncio.create_task(collect(flow, 1, 2))
        sent = 0
        while not (small.done() and all(task.done() for task in big.tasks)):
            await big.settle()
            sent += 1
            flow.acknowledged(0, sent)
            flow.acknowledged(1, sent)
            assert sent < 20
        assert len(big.order) == 6

    asyncio.run(main())


async def collect(flow: Flow, server: int, chunks: int) -> int:
    async with aclosing(flow.keep(server, frames(chunks))) as leaving:
        return len([frame async for frame in leaving])


def test_where_nobody_tells_nobody_waits() -> None:
    async def main() -> None:
        flow = Flow([9 * SIZE] * 2, 0, SIZE, lambda: False, patience_s=1e6)
        await asyncio.gather(*Wire(flow, 2, 9).tasks)

    asyncio.run(main())


def test_where_nothing_arrives_all_goes_on() -> None:
    async def main() -> None:
        flow = Flow([9 * SIZE] * 2, 0, SIZE, lambda: True, patience_s=1e-3)
        async with asyncio.timeout(20.0):
            await asyncio.gather(*Wire(flow, 2, 9).tasks)

    asyncio.run(main())


def test_an_upload_that_ends_gives_its_place_away() -> None:
    async def main() -> None:
        flow = Flow([4 * SIZE] * 2, 0, 2 * SIZE, lambda: True, patience_s=1e6)
        wire = Wire(flow, 2, 4)
        assert await wire.settle() == [0, 1]
        wire.tasks[0].cancel()
        assert await wire.settle() == [0, 1, 1], "what was under way to the other one counts no more"
        wire.tasks[1].cancel()
        await asyncio.gather(*wire.tasks, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_all_leaves_whatever_arrives_when(seed: int) -> None:
    """Never more under way than the window, and everything in the end."""
    drawn = random.Random(seed)
    servers, window = drawn.randint(2, 5), drawn.randint(1, 9) * SIZE
    chunks = [drawn.randint(1, 12) for _ in range(servers)]

    async def main() -> None:
        flow = Flow([count * SIZE for count in chunks], drawn.randrange(9), window, lambda: True, patience_s=1e6)
        sent, come = [0] * servers, [0] * servers

        async def take(server: int) -> None:
            async with aclosing(flow.keep(server, frames(chunks[server]))) as leaving:
                async for frame in leaving:
                    sent[server] += len(frame) == SIZE
                    assert sum(sent) - sum(come) <= max(1, window // SIZE)
            come[server] = sent[server]  # ended, so that nothing of it is under way

        tasks = [asyncio.create_task(take(server)) for server in range(servers)]
        for _ in range(10_000):
            await asyncio.sleep(0)
            server = drawn.randrange(servers)
            if come[server] < sent[server]:
                come[server] += 1
                flow.acknowledged(server, come[server])
            if all(task.done() for task in tasks):
                break
        await asyncio.gather(*tasks)
        assert sent == chunks

    asyncio.run(main())


def test_only_what_is_large_takes_turns() -> None:
    flow_control = FlowControl(2, 1 << 20)
    large = [5 << 20, 5 << 20]
    with flow_control.leaving(7, large, 0), flow_control.leaving(8, [1 << 20, 0], 0), flow_control.leaving(0, large, 0):
        assert flow_control.flow(7) is not None
        assert flow_control.flow(8) is flow_control.flow(0) is None
        flow_control.acknowledged(0, [shard_pb2.Ack(nonce=99, chunks=3)])  # of one that is over
    assert flow_control.flow(7) is None
    with FlowControl(1, 1 << 20).leaving(7, [64 << 20], 0):
        pass


def test_all_servers_must_tell() -> None:
    """Else there is no window."""
    chunk, count = 128 << 10, 8

    async def left(tells: tuple[bool, bool]) -> int:
        flow_control = FlowControl(2, SIZE)
        with (
            flow_control.leaving(7, [count * chunk] * 2, 0),
            flow_control.telling(0, tells[0]),
            flow_control.telling(1, tells[1]),
        ):
            flow = flow_control.flow(7)
            assert flow is not None
            wire = Wire(flow, 2, count, chunk)
            found = len(await wire.settle())
            for task in wire.tasks:
                task.cancel()
            await asyncio.gather(*wire.tasks, return_exceptions=True)
            return found

    assert asyncio.run(left((True, True))) == 4
    assert asyncio.run(left((True, False))) == 2 * count


def test_who_waits_goes_on_when_nobody_tells_any_more() -> None:
    """Such as when the version has come: others have computed what this contribution brings."""

    async def main() -> None:
        flow_control = FlowControl(2, SIZE)
        with flow_control.leaving(7, [1 << 20] * 2, 0):
            flow = flow_control.flow(7)
            assert flow is not None
            with flow_control.telling(0, True), flow_control.telling(1, True):
                wire = Wire(flow, 2, 8, 128 << 10)
                await wire.settle()
                assert not any(task.done() for task in wire.tasks)
            await wire.settle()
            assert all(task.done() for task in wire.tasks), "without any patience"

    asyncio.run(main())


def test_many_workers_have_less_under_way() -> None:
    """What they send meets before the servers."""
    flow_control = FlowControl(2, 1 << 20)
    windows = []
    for workers in (1, 2, 8):
        with flow_control.leaving(7, [64 << 20] * 2, 0, workers):
            flow = flow_control.flow(7)
            assert flow is not None
            windows.append(vars(flow)["_window"])
    assert windows == [8 << 20, 8 << 20, 2 << 20]
