"""One contribution on its way to the servers: it begins, its chunks become ready, then it is sealed or aborted.

A contribution that leaves early begins with its batch, and is sealed when the script has stepped. Every other
contribution begins and is sealed in ``optimizer.step()``. A server counts no contribution before it is sealed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from paramserver.core.layout.plan import Chunk, Plan
from paramserver.frames import AnyFrame
from paramserver.tensors.codec import chunk_frames
from paramserver.tensors.dtypes import buffer_of
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref
from paramserver.worker.background import Background
from paramserver.worker.gradients.contribution import Outcomes, PushFacts

if TYPE_CHECKING:
    from paramserver.worker.device import Ticket

log = structlog.get_logger("paramserver.worker")

# The bytes of a chunk by its index.
Read = Callable[[int], memoryview]
# Begins to copy a chunk to where its bytes are read.
Copy = Callable[[int], "Ticket"]
# A push of less is one frame. Else each chunk has one of its own: servers begin with a chunk when all have sent it.
_FRAME_BYTES = 256 << 10


class Leaving:
    """A contribution. One thread fills it, which may be the script's; the loop reads it.

    ``read`` gives the bytes of a chunk by its index; ``copy``, for a model on a device, brings a chunk there that is
    ready. The bytes of a sealed synchronous contribution stay as they are
    until a later version is published, or the push is aborted.
    """

    def __init__(self, plan: Plan, facts: PushFacts, read: Read, copy: Copy | None = None) -> None:
        self.facts, self.read = facts, read
        self._plan, self._copy = plan, copy
        # The loop that brings it to the servers, and the answers to come; None before it begins to leave.
        self._loop: asyncio.AbstractEventLoop | None = None
        self.push: concurrent.futures.Future[Outcomes] | None = None
        # By chunk, how many of its tensors are missing; by tensor, the chunks that hold parts of it.
        self._lacking: dict[int, int] = {}
        self._chunks_of: dict[int, list[int]] | None = None
        # In the loop: whether all of it is there and final; the chunks that were ready before, in their order.
        self.sealed = False
        self._ready: list[int] = []
        self._changed = asyncio.Event()
        # Copies under way, in the order in which they began, each with what is to be done then.
        self._copies: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._following: asyncio.Task[None] | None = None

    # ---- its life

    def begin(self, background: Background, push: Coroutine[Any, Any, Outcomes]) -> concurrent.futures.Future[Outcomes]:
        """Let it leave by ``push``; returns the answers to come."""
        self._loop = background.loop
        self.push = background.submit(push)
        return self.push

    def ready(self, tensor: int) -> None:
        """A tensor is in its place. A second call for the same tensor changes nothing."""
        assert self._loop is not None, "it has begun"
        if self._chunks_of is None:
            self._chunks_of = self._count()
        for chunk in self._chunks_of.pop(tensor, ()):
            self._lacking[chunk] -= 1
            if not self._lacking[chunk]:
                self._when(None if self._copy is None else self._copy(chunk), partial(self._add, chunk))

    def seal(self, ticket: Ticket | None = None) -> None:
        """All of it is there when ``ticket`` has been waited for, and what was sent of it is final."""
        if self._loop is None:
            assert ticket is None, "it has begun"
            self._seal()
        else:
            self._when(ticket, self._seal)

    def _when(self, ticket: Ticket | None, then: Callable[[], None]) -> None:
        assert self._loop is not None
        if ticket is None:
            self._loop.call_soon_threadsafe(then)
        else:
            self._loop.call_soon_threadsafe(self._follow, ticket, then)

    def abort(self) -> None:
        """Stop sending this contribution. Servers that have counted it keep it."""
        if self.push is not None:
            self.push.cancel()

    def _count(self) -> dict[int, list[int]]:
        chunks_of: dict[int, list[int]] = {tensor: [] for tensor in self.facts.used}
        for chunk in self._plan.layout.chunks:
            here = {piece.tensor for piece in chunk.pieces} & self.facts.used
            self._lacking[chunk.index] = len(here)
            for tensor in here:
                chunks_of[tensor].append(chunk.index)
        return chunks_of

    # ---- in the loop

    def _follow(self, ticket: Ticket, then: Callable[[], None]) -> None:
        self._copies.append((ticket, then))
        if self._following is None:
            self._following = asyncio.ensure_future(self._wait_for_copies())

    async def _wait_for_copies(self) -> None:
        """One after the other: a device ends them in their order."""
        loop = asyncio.get_running_loop()
        try:
            while self._copies:
                ticket, then = self._copies.popleft()
                await loop.run_in_executor(None, ticket.wait)
                then()
        except RuntimeError as error:  # of the device; the script's thread meets it, too
            log.error("a copy from the device failed", reason=str(error))
            self.abort()
        finally:
            self._following = None

    def _add(self, chunk: int) -> None:
        self._ready.append(chunk)
        self._stir()

    def _seal(self) -> None:
        self.sealed = True
        self._stir()

    def _stir(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def whole(self) -> None:
        """Wait until it is sealed."""
        while not self.sealed:
            await self._changed.wait()

    async def frames(
        self, header: shard_pb2.PushHeader, chunks: Sequence[Chunk], apart: bool = False
    ) -> AsyncIterator[AnyFrame]:
        """The frames of a push of these chunks: each chunk as soon as it is ready, and the end when it is sealed.

        ``apart``: each chunk has a frame of its own, however small it is.
        """
        if self.sealed and not apart and sum(chunk.nbytes for chunk in chunks) <= _FRAME_BYTES:
            for frame in chunk_frames(header, map(self._part, chunks)):
                yield frame
            return
        for frame in chunk_frames(header, ()):  # at once, so that servers know of it
            yield frame
        async for chunk in self._as_ready(chunks):
            for frame in chunk_frames(None, [self._part(chunk)], 1):
                yield frame

    async def _as_ready(self, chunks: Sequence[Chunk]) -> AsyncIterator[Chunk]:
        """These chunks, each as soon as it is ready. Ends when all of them are final."""
        left, at = {chunk.index: chunk for chunk in chunks}, 0
        while True:
            changed = self._changed
            while at < len(self._ready):
                chunk = left.pop(self._ready[at], None)
                at += 1
                if chunk is not None:
                    yield chunk
            if self.sealed:
                break
            await changed.wait()
        for chunk in left.values():
            yield chunk

    def _part(self, chunk: Chunk) -> tuple[shard_pb2.ChunkRef, memoryview]:
        """A chunk as a frame carries it."""
        made = self.facts.encoded.get(chunk.index)
        if made is None:
            return chunk_ref(chunk), self.read(chunk.index)
        return chunk_ref(chunk, made.encoding, made.payload.numel()), buffer_of(made.payload)
