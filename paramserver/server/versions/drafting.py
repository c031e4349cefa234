"""The next version before its step is complete: made chunk by chunk while contributions still arrive, and sent ahead.

A link carries both ways at once, so weights should go out while gradients still come in. A *draft* is what the next
version will be if everything that is on its way arrives whole. It changes nothing: the state machine decides as always
what a version is made of, and only if that is what the draft was made of does it become the version. Otherwise it is
forgotten, with the copies of the optimizer state that it was made with.

Lives in the event loop; the arithmetic runs in its thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from paramserver.core.layout.plan import Kind, moving_bytes
from paramserver.core.layout.thresholds import DRAFT_BYTES
from paramserver.core.versions.names import SyncName
from paramserver.server.versions.version import part
from paramserver.tensors.codec import encode_frame
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor

    from paramserver.compress.base import Compressor
    from paramserver.core.layout.plan import Chunk
    from paramserver.server.arithmetic.apply import ChunkState
    from paramserver.server.versions.shard import Contribution, Making, ShardTensors
    from paramserver.server.versions.version import Version

log = structlog.get_logger("paramserver.server")

Do = Callable[[Callable[[], None]], Awaitable[None]]

# A shard with less than that to send is not drafted: it takes no longer than a call or two.
LEAST_BYTES = DRAFT_BYTES


class Draft:
    """A version that is perhaps going to be, ``making``: if it is made of these contributions and of nothing else.

    ``rounding``: in which form its weights are sent.
    """

    def __init__(self, number: int, making: Making, rounding: Compressor | None = None) -> None:
        self.number, self.making, self.rounding = number, making, rounding
        # By chunk: the weights, and the optimizer state that goes with them. Filled in the arithmetic thread.
        self.made: dict[int, tuple[Tensor, ChunkState | None]] = {}
        # By chunk, what is sent of it, encoded once for all who pull; and which chunk was made after which.
        self.frames: dict[int, bytes] = {}
        self.order: list[int] = []

    def encode(self, chunk: Chunk, weights: Tensor) -> bytes:
        """A frame with one chunk."""
        ref, data = part(chunk, weights, self.rounding)
        return encode_frame(shard_pb2.FrameHeader(chunks=[ref], draft=self.number), [data])

    def becomes(self, version: Version) -> None:
        """The draft is this version: workers that pull ahead have some of its frames already. Not thread-safe."""
        moving = version.moving(False)
        for chunk in moving:
            if chunk.index not in self.frames:
                self.frames[chunk.index] = self.encode(chunk, version.tensors[chunk.index])
        version.was(self.number, self.rounding, [self.frames[chunk.index] for chunk in moving])


class Drafting:
    """The draft of one shard's next version, if there is one. ``do`` runs something in the arithmetic thread."""

    def __init__(self, tensors: ShardTensors, do: Do) -> None:
        self.draft: Draft | None = None
        # What those who pull ahead want weights to be rounded to; the same for all of a job.
        self.rounding: Compressor | None = None
        # How many drafts became versions, and how many were forgotten.
        self.adopted = self.forgotten = 0
        self._tensors, self._do = tensors, do
        self._numbers = itertools.count(1)
        self._chunks = {chunk.index: chunk for chunk in tensors.chunks}
        self._moving_bytes = moving_bytes(tensors.chunks)
        self._base: Version | None = None
        self._parts: list[Contribution] = []
        self._lacking: dict[int, int] = {}
        # All are set when there is more of a draft, or another one, or none.
        self.listeners: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- contributions arrive

    def begins(self, part: Contribution, base: Version) -> None:
        """A contribution to the version after ``base`` begins to arrive; its chunks are filled in as they come."""
        if self._moving_bytes < LEAST_BYTES:
            return
        if self._base is not base:
            self._forget()
            self._base, self._parts = base, []
        name = part.name
        assert isinstance(name, SyncName)
        others = [one for one in self._parts if isinstance(one.name, SyncName) and _overlap(one.name, name)]
        if any(other.worker != part.worker for other in others):
            return  # somebody is quicker with it
        for other in others:  # the same worker begins anew
            self.fails(other)
        self._parts.append(part)
        if sum(one.name.slices for one in self._parts) == name.of:
            self._start(base)

    def came(self, part: Contribution, chunk: int) -> None:
        """A chunk of it is there."""
        draft = self.draft
        if draft is None or not any(one is part for one in draft.making.parts) or chunk not in self._lacking:
            return
        self._lacking[chunk] -= 1
        if not self._lacking[chunk]:
            self._make(draft, self._chunks[chunk])

    def fails(self, part: Contribution) -> None:
        """The push of a contribution failed before all chunks were received."""
        if any(one is part for one in self._parts):
            self._parts = [one for one in self._parts if one is not part]
            self._forget()

    # ---- what becomes of a draft

    def take(self, base: Version, parts: Sequence[Contribution]) -> Draft | None:
        """The draft that was made of just these contributions; from now on it is nobody's draft any more."""
        draft, self.draft = self.draft, None
        self._base, self._parts = None, []
        if draft is None:
            return None
        making = draft.making
        same = making.base is base and {id(part) for part in making.parts} == {id(part) for part in parts}
        if same:
            self.adopted += 1
        else:
            self.forgotten += 1
        self._tell()
        return draft if same else None

    async def close(self) -> None:
        """Nothing is drafted any more."""
        self._forget()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- making it

    def _start(self, base: Version) -> None:
        parts = sorted(self._parts, key=lambda one: one.name.lo if isinstance(one.name, SyncName) else 0)
        moving = [chunk for chunk in self._tensors.chunks if chunk.kind is not Kind.FROZEN]
        self._lacking = {
            chunk.index: sum(chunk.uses(part.used) and chunk.index not in part.chunks for part in parts)
            for chunk in moving
        }
        if not any(self._lacking.values()):
            return  # all is there: the version itself is about to be made
        draft = self.draft = Draft(next(self._numbers), self._tensors.making(base, parts), self.rounding)
        for chunk in moving:
            if not self._lacking[chunk.index]:
                self._make(draft, chunk)

    def _make(self, draft: Draft, chunk: Chunk) -> None:
        task = asyncio.get_running_loop().create_task(self._made(draft, chunk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _made(self, draft: Draft, chunk: Chunk) -> None:
        def work() -> None:
            if self.draft is not draft:
                return
            weights, state = self._tensors.drafted(chunk, draft.making)
            draft.made[chunk.index] = weights, state
            draft.frames[chunk.index] = draft.encode(chunk, weights)
            draft.order.append(chunk.index)

        try:
            await self._do(work)
        except Exception as error:  # the version itself will meet with it, and say so
            log.debug("could not make a draft", error=str(error))
            self._forget()
        if self.draft is draft:
            self._tell()

    def _forget(self) -> None:
        if self.draft is not None:
            self.draft = None
            self.forgotten += 1
            self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener.set()


def _overlap(one: SyncName, other: SyncName) -> bool:
    return one.lo < other.hi and other.lo < one.hi
