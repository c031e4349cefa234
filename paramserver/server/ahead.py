"""A pull whose answer begins to go out before it is decided: the chunks of drafts as they are made, see `drafting`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from paramserver.compress.base import Compressor
from paramserver.core.events import AnswerPull, PullAsked
from paramserver.server.running import RunningShard
from paramserver.server.version import Version

# Whoever has been sent something is not asked to come again for so long.
_WAIT_S = 60.0


class Ahead:
    """One pull. ``ask`` makes the question of the number of the call; ``wait_s``: how long it may wait.

    ``rounding``: what its weights are rounded to; only drafts in that form are sent.
    """

    def __init__(
        self,
        shard: RunningShard,
        ask: Callable[[int], PullAsked],
        wait_s: float,
        rounding: Compressor | None = None,
    ) -> None:
        self._shard, self._ask, self._wait_s = shard, ask, wait_s
        self._rounding = shard.drafting.rounding = rounding
        # What was sent: by the number of a draft, which of its chunks.
        self._sent: dict[int, set[int]] = {}
        # The state machine's answer, after :meth:`frames`; None if none came in time.
        self.pulled: AnswerPull | None = None

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The frames of drafts as they are made, until there is an answer. Raises what the pull is refused with."""
        drafting = self._shard.drafting
        answer = asyncio.ensure_future(self._answer())
        try:
            while not answer.done():
                progress, draft = drafting.progress, drafting.draft
                fresh: list[int] = []
                if draft is not None and draft.rounding is self._rounding:
                    have = self._sent.setdefault(draft.number, set())
                    fresh = [index for index in list(draft.frames) if index not in have]
                    for index in fresh:
                        have.add(index)
                        yield draft.frames[index]
                        if answer.done() or drafting.draft is not draft:
                            break
                if not fresh:
                    await _first(answer, progress)
            self.pulled = answer.result()
        finally:
            answer.cancel()

    async def _answer(self) -> AnswerPull | None:
        deadline = time.monotonic() + max(self._wait_s, _WAIT_S)
        while (pulled := await self._shard.pull(self._ask, self._wait_s)) is None:
            if not any(self._sent.values()) or time.monotonic() > deadline:
                break
        return pulled

    def rest(self, version: Version, frames: Sequence[bytes]) -> Iterator[bytes]:
        """Those of the version's frames that have not been sent: all, unless it was the draft of what was."""
        have = self._sent.get(version.draft, set()) if version.draft else set()
        if not have:
            yield from frames
            return
        # What was a draft has one frame for each chunk.
        for chunk, frame in zip(version.moving(False), frames, strict=True):
            if chunk.index not in have:
                yield frame


async def _first(answer: asyncio.Future[AnswerPull | None], progress: asyncio.Event) -> None:
    more = asyncio.ensure_future(progress.wait())
    try:
        await asyncio.wait((answer, more), return_when=asyncio.FIRST_COMPLETED)
    finally:
        more.cancel()
