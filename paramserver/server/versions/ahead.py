"""A pull that is sent the chunks of drafts as they are made, before its answer is decided; see `drafting`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from paramserver.compress.base import Compressor
from paramserver.core.versions.events import AnswerPull, PullAsked
from paramserver.frames import AnyFrame, Frame
from paramserver.server.running import RunningShard
from paramserver.server.versions.version import Version
from paramserver.tensors.codec import frame_of
from paramserver.v1 import shard_pb2

# After a frame was sent, the worker is not told to ask again for so long.
_WAIT_S = 60.0


class Ahead:
    """One pull. ``ask`` makes the question out of the number of the call; ``wait_s``: seconds that it may wait.

    ``rounding``: the form of its weights; only drafts in this form are sent. ``worker``: the number of the worker if
    it wants acks of its contributions. ``bare``: it wants no chunks.
    """

    def __init__(
        self,
        shard: RunningShard,
        ask: Callable[[int], PullAsked],
        wait_s: float,
        rounding: Compressor | None = None,
        worker: int | None = None,
        bare: bool = False,
    ) -> None:
        self._bare = bare
        self._shard, self._ask, self._wait_s, self._worker = shard, ask, wait_s, worker
        self._rounding = shard.drafting.rounding = rounding
        # By the number of a draft, the chunks that were sent.
        self._sent: dict[int, set[int]] = {}
        self._sent_at = -math.inf
        # The state machine's answer, after :meth:`frames`; None if none came in time.
        self.pulled: AnswerPull | None = None

    async def frames(self) -> AsyncGenerator[AnyFrame, None]:
        """The frames of drafts as they are made, until there is an answer. Raises the error of a refused pull."""
        drafting = self._shard.drafting
        stir = asyncio.Event()
        answer = asyncio.ensure_future(self._answer())
        answer.add_done_callback(lambda _: stir.set())
        drafting.listeners.add(stir)
        try:
            with self._news(stir) as news:
                while not answer.done():
                    stir.clear()
                    if acks := news():
                        yield frame_of(shard_pb2.FrameHeader(acks=acks), ())
                    frame = self._next()
                    if frame is not None:
                        yield frame
                    elif not answer.done():
                        await stir.wait()
            self.pulled = answer.result()
        finally:
            drafting.listeners.discard(stir)
            answer.cancel()

    def _news(self, stir: asyncio.Event) -> AbstractContextManager[Callable[[], list[shard_pb2.Ack]]]:
        return nullcontext(list) if self._worker is None else self._shard.acks.heard(self._worker, stir)

    def _next(self) -> Frame | None:
        """A frame of the present draft that has not been sent."""
        draft = self._shard.drafting.draft
        if self._bare or draft is None or draft.rounding is not self._rounding:
            return None
        have = self._sent.setdefault(draft.number, set())
        if len(have) == len(draft.order):
            return None
        index = draft.order[len(have)]
        have.add(index)
        self._sent_at = time.monotonic()
        return draft.frames[index]

    async def _answer(self) -> AnswerPull | None:
        while (pulled := await self._shard.pull(self._ask, self._wait_s)) is None:
            if time.monotonic() > self._sent_at + _WAIT_S:
                break
        return pulled

    def rest(self, version: Version, frames: Sequence[AnyFrame]) -> Iterator[AnyFrame]:
        """The version's frames that are not sent yet: all, unless frames of this version's draft were sent ahead."""
        have = self._sent.get(version.draft, set()) if version.draft else set()
        if not have:
            yield from frames
            return
        # What was a draft has one frame for each chunk.
        for chunk, frame in zip(version.moving(False), frames, strict=True):
            if chunk.index not in have:
                yield frame
