"""Memory in which a primary makes what its versions are made of, so that backups on its host read it there.

There is room for one content. The primary writes the next one when all backups have made the version that the former
one is for. Usually they have made it while workers compute. The memory has no name. It lives as long as a backup maps
it, also when the primary is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import structlog
import torch

from paramserver.core.layout.arena import Arena, make_arena, pages
from paramserver.core.layout.plan import Chunk, Plan
from paramserver.tensors.dtypes import tensor_from, torch_dtype
from paramserver.transport.base import Channel, Neighbour
from paramserver.transport.shm.meeting import Meeting, host
from paramserver.transport.shm.segments import PAGE, Segment, available
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.server")

_LEND_S = 10.0


def outbox_arena(plan: Plan) -> Arena:
    """How an outbox is laid out: as one slot."""
    return make_arena(plan.layout, PAGE)


class Content:
    """The content of a version: by chunk, the gradient that the optimizer applies.

    Call it for memory for a chunk, after :meth:`free`. ``lent``: the memory is the outbox, not this process's own.
    """

    def __init__(
        self,
        place: Callable[[Chunk], torch.Tensor],
        lent: bool = False,
        readers: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``readers`` returns when nobody reads the memory any more; None: nobody does."""
        self.lent = lent
        # Filled in the thread for arithmetic.
        self.chunks: dict[int, torch.Tensor] = {}
        self._place, self._readers = place, readers

    async def free(self) -> None:
        """Return when the memory may be written. Raises what the wait for those that read it raises."""
        if self._readers is not None:
            await self._readers()

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        """Memory for a chunk, which is to be written now."""
        place = self.chunks[chunk.index] = self._place(chunk)
        return place


def private() -> Content:
    """A content in memory of this process's own."""
    return Content(lambda chunk: torch.zeros(chunk.elements, dtype=torch_dtype(chunk.dtype)))


@dataclass(slots=True)
class Loan:
    """A backup that can read the outbox. ``channel``: a socket for calls to it. ``good``: it has not said otherwise."""

    meeting: str
    channel: Neighbour
    good: bool = True


class Outbox:
    """The memory of one shard at its primary. Lives in the event loop."""

    def __init__(self, plan: Plan, shard: int) -> None:
        self._plan, self._shard = plan, shard
        self._segment: Segment | None = None
        self._reserving: asyncio.Future[Segment | None] | None = None

    def content(self, readers: Callable[[], Awaitable[None]]) -> Content:
        """Memory for what the next version is made of. ``readers`` returns when no backup reads this memory."""
        segment = self._segment
        if segment is None:
            return private()
        arena = outbox_arena(self._plan)

        def place(chunk: Chunk) -> torch.Tensor:
            start = arena.start(chunk)
            return tensor_from(segment.view[start : start + chunk.nbytes], chunk.dtype)

        return Content(place, True, readers)

    async def lend(self, channel: Channel, job: str, timeline: int, placement: int) -> Loan | None:
        """Let a backup read this memory; None if it cannot, or if there is no memory. Raises what the call raises."""
        if (segment := await self._reserved()) is None:
            return None
        try:
            meeting = Meeting()
        except OSError as error:
            log.info("no memory can be shared with backups", reason=f"no place to meet them: {error}")
            return None
        try:
            request = shard_pb2.LendRequest(
                job=job,
                timeline=timeline,
                placement=placement,
                layout_digest=self._plan.layout.digest,
                meeting=meeting.name,
                bytes=segment.nbytes,
                host=host(),
            )
            reply = cast(shard_pb2.LendResponse, await channel.call("Shard.Lend", request, timeout=_LEND_S))
            if reply.refusal:
                log.debug("a backup gets versions over the network", at=channel.address, reason=reply.refusal)
                return None
            (line,) = meeting.swap(segment.reading_fd)
            self._segment = segment
            return Loan(meeting.name, channel.beside(socket.socket(fileno=line)))
        except OSError as error:
            log.info("no memory can be shared with a backup", at=channel.address, reason=str(error))
            return None
        finally:
            meeting.close()

    async def _reserved(self) -> Segment | None:
        """The memory, reserved; None if there is not enough. Made once."""
        if self._reserving is None:
            self._reserving = asyncio.ensure_future(asyncio.to_thread(self._reserve))
        return await asyncio.shield(self._reserving)

    def _reserve(self) -> Segment | None:
        if not available():
            return None
        arena = outbox_arena(self._plan)
        own = [run for run in arena.runs(self._plan, False) if run.shard == self._shard]
        try:
            segment = Segment(arena.slot_bytes)
            for start, length in pages(own, PAGE):
                segment.reserve(start, length)
        except OSError as error:
            log.warning(
                "there is no memory for versions that backups on this host can read in place; they are sent over the "
                "network instead, which is slower: give this host or container more memory",
                error=str(error),
            )
            return None
        return segment

    async def close(self) -> None:
        """Lend nothing any more. What is mapped stays until nobody uses it."""
        segment, self._segment = self._segment, None
        if self._reserving is not None:
            segment = await self._reserving
        if segment is not None:
            segment.close()
