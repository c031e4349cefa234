"""The life of a contribution on its way: what of it leaves when, and that nothing ends before the seal."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from paramserver.core.layout.plan import Chunk, TensorSpec, make_layout, make_plan
from paramserver.core.versions.names import SyncName
from paramserver.tensors.codec import split_frame
from paramserver.v1 import shard_pb2
from paramserver.worker.background import Background
from paramserver.worker.gradients.contribution import Outcomes, PushFacts
from paramserver.worker.gradients.leaving import Leaving

# Four tensors in four chunks, of which the last one is not used.
PLAN = make_plan(make_layout([TensorSpec(name, (16,), "float32") for name in "abcd"], 64), 1)
CHUNKS: list[Chunk] = list(PLAN.chunks_of(0))[:3]
FACTS = PushFacts(SyncName(0, 0, 1, 1), 1, False, frozenset({0, 1, 2}), (), [0])


class Here:
    """In place of the thread in the background: the loop of the test."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def submit(self, work: Coroutine[Any, Any, Outcomes]) -> concurrent.futures.Future[Outcomes]:
        work.close()
        return concurrent.futures.Future()


async def _push() -> Outcomes:
    raise AssertionError("it is not brought anywhere")


def begun() -> Leaving:
    leaving = Leaving(PLAN, FACTS, lambda chunk: memoryview(bytes([chunk]) * 64))
    leaving.begin(cast(Background, Here()), _push())
    return leaving


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Reader:
    """Takes the frames of a push, as far as there are any."""

    def __init__(self, leaving: Leaving, apart: bool = False) -> None:
        # By frame, its chunks.
        self.frames: list[list[int]] = []
        self._task = asyncio.ensure_future(self._read(leaving, apart))

    async def _read(self, leaving: Leaving, apart: bool) -> None:
        async for frame in leaving.frames(shard_pb2.PushHeader(chunks=len(CHUNKS)), CHUNKS, apart):
            header, parts = split_frame(frame)
            assert (header.WhichOneof("first") == "push") == (not self.frames)
            self.frames.append([ref.index for ref, _ in parts if isinstance(ref, shard_pb2.ChunkRef)])
            assert all(bytes(data) == bytes([ref.index]) * 64 for ref, data in parts)  # type: ignore[union-attr]

    @property
    def ended(self) -> bool:
        return self._task.done() and self._task.exception() is None

    def stop(self) -> None:
        self._task.cancel()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("apart", [False, True])
def test_one_that_is_sealed_at_once_leaves_as_a_whole(apart: bool) -> None:
    async def test() -> None:
        leaving = Leaving(PLAN, FACTS, lambda chunk: memoryview(bytes([chunk]) * 64))
        leaving.seal()
        reader = Reader(leaving, apart)
        await turns()
        assert reader.ended
        assert reader.frames == ([[], [0], [1], [2]] if apart else [[0, 1, 2]])

    run(test)


def test_chunks_leave_as_they_are_ready_and_the_rest_with_the_seal() -> None:
    async def test() -> None:
        leaving = begun()
        reader = Reader(leaving)
        await turns()
        assert reader.frames == [[]], "servers know of it"
        leaving.ready(1)
        leaving.ready(1)
        leaving.ready(3)  # not announced
        await turns()
        assert reader.frames == [[], [1]]
        leaving.seal()
        await turns()
        assert reader.ended
        assert reader.frames == [[], [1], [0], [2]]

    run(test)


def test_nothing_ends_before_the_seal_even_if_all_is_ready() -> None:
    async def test() -> None:
        leaving = begun()
        reader, whole = Reader(leaving), asyncio.ensure_future(leaving.whole())
        for tensor in (2, 0, 1):
            leaving.ready(tensor)
        await turns()
        assert reader.frames == [[], [2], [0], [1]]
        assert (reader.ended, whole.done()) == (False, False)
        leaving.seal()
        await turns()
        assert (reader.ended, whole.done()) == (True, True)
        again = Reader(leaving)
        await turns()
        assert again.frames == [[0, 1, 2]], "a second attempt begins with all of it"

    run(test)


def test_to_abort_it_cancels_its_push() -> None:
    async def test() -> None:
        leaving = begun()
        assert leaving.push is not None
        reader = Reader(leaving)
        await turns()
        leaving.abort()
        assert leaving.push.cancelled()
        assert not reader.ended
        reader.stop()

    run(test)
