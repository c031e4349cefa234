"""A contribution that leaves while the backward pass still computes it: chunk by chunk, as gradients become ready.

Nothing is taken on trust. Each upload ends only when the script has called ``optimizer.step()`` and every gradient has
turned out to be, bit for bit, what was sent; until then servers count nothing of it. If the script has changed a
gradient meanwhile (clipped it, added to it), the uploads break off and the contribution is pushed as if there had been
none of this.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paramserver.core.versions.names import AsyncName

if TYPE_CHECKING:
    from paramserver.core.layout.plan import Plan
    from paramserver.v1 import shard_pb2
    from paramserver.worker.background import Background
    from paramserver.worker.flat import PartialSum, PartialSumPool
    from paramserver.worker.gradients.contribution import PushFacts
    from paramserver.worker.links import ShardLinks
    from paramserver.worker.weights.pulled import Pulled

# Below this a contribution is not worth it: a push of it is over as soon as it begins.
LEAST_BYTES = 4 << 20


class EarlyChunks:
    """The chunks of one contribution, as they become ready. The script's thread fills in, the loop reads."""

    def __init__(self, plan: Plan, used: Iterable[int], loop: asyncio.AbstractEventLoop) -> None:
        """``used``: the tensors of which the contribution is expected to have gradients or changes."""
        self._loop = loop
        wanted = frozenset(used)
        # By chunk, how many of its tensors are not there yet; by tensor, in which chunks it is.
        self._lacking: dict[int, int] = {}
        self._chunks_of: dict[int, list[int]] = {tensor: [] for tensor in wanted}
        for chunk in plan.layout.chunks:
            here = {piece.tensor for piece in chunk.pieces} & wanted
            if here:
                self._lacking[chunk.index] = len(here)
            for tensor in here:
                self._chunks_of[tensor].append(chunk.index)
        # In the loop: the chunks that are ready, in their order; whether it is certain that they are right.
        self._ready: list[int] = []
        self._sealed = asyncio.Event()
        self._changed = asyncio.Event()

    def ready(self, tensor: int) -> None:
        """A tensor is in its place. Says so once; more often changes nothing."""
        for chunk in self._chunks_of.pop(tensor, ()):
            self._lacking[chunk] -= 1
            if not self._lacking[chunk]:
                self._loop.call_soon_threadsafe(self._add, [chunk], False)

    def seal(self) -> None:
        """All is there, and what was sent is right."""
        rest = [chunk for chunk, lacking in self._lacking.items() if lacking]
        self._loop.call_soon_threadsafe(self._add, rest, True)

    def _add(self, chunks: list[int], sealed: bool) -> None:
        self._ready += chunks
        if sealed:
            self._sealed.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def of(self, mine: frozenset[int]) -> AsyncIterator[int]:
        """Those of these chunks that are ready, as they become so; ends when all is certain."""
        at = 0
        while True:
            changed = self._changed
            while at < len(self._ready):
                at += 1
                if self._ready[at - 1] in mine:
                    yield self._ready[at - 1]
            if self._sealed.is_set() and at == len(self._ready):
                return
            if not self._sealed.is_set():
                await changed.wait()

    async def whole(self) -> None:
        """Wait until all is certain."""
        await self._sealed.wait()


@dataclass(frozen=True, slots=True)
class Early:
    """A contribution that has begun to leave. ``partial`` is filled by the script's thread."""

    partial: PartialSum
    facts: PushFacts
    chunks: EarlyChunks
    push: concurrent.futures.Future[frozenset[shard_pb2.Outcome]]
    pool: PartialSumPool

    def give_back(self) -> None:
        """The memory of the partial sum goes back to the pool once the push is over; the script is done with it."""
        self.push.add_done_callback(lambda _: self.pool.give(self.partial))

    def break_off(self) -> None:
        """It is not wanted."""
        self.push.cancel()
        self.give_back()


class EarlyPushes:
    """The one contribution of a worker that may be leaving, and the pull of what it leads to."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._present: Early | None = None
        self._pull: tuple[int, concurrent.futures.Future[list[Pulled]]] | None = None

    def begin(
        self, links: ShardLinks, partial: PartialSum, facts: PushFacts, pool: PartialSumPool, begin_pull: bool = False
    ) -> EarlyChunks:
        """Begin to push a contribution to all shards; the memory of ``partial`` returns to the pool after the push.

        ``begin_pull``: what the pull brings may be used before all of it is there.
        """
        self.drop()
        chunks = EarlyChunks(links.plan, facts.used, self._background.loop)
        push = self._background.submit(links.push(facts, partial.space.read, chunks))
        self._present = Early(partial, facts, chunks, push, pool)
        if isinstance(facts.name, AsyncName):  # what it leads to depends on others, too
            return chunks
        version = min(facts.base_versions) + 1
        self._pull = version, self._background.submit(links.pull_version(version, ahead=True, begin=begin_pull))
        return chunks

    def complete(
        self, partial: PartialSum, facts: PushFacts
    ) -> concurrent.futures.Future[frozenset[shard_pb2.Outcome]] | None:
        """The push of this contribution if it is the one that is leaving; anything else that leaves breaks off.

        Without one, ``partial`` is the caller's again.
        """
        early, self._present = self._present, None
        if early is None:
            return None
        if partial is early.partial and replace(facts, nonce=early.facts.nonce) == early.facts:
            early.chunks.seal()
            early.give_back()
            return early.push
        if partial is early.partial:
            early.push.cancel()
        else:
            early.break_off()
        return None

    def has(self, partial: PartialSum) -> bool:
        """Whether this is what is leaving."""
        return self._present is not None and self._present.partial is partial

    def pull(self, version: int) -> concurrent.futures.Future[list[Pulled]] | None:
        """The pull that was begun with the push, if it asks for this version."""
        asked, self._pull = self._pull, None
        if asked is None:
            return None
        if asked[0] != version or (asked[1].done() and (asked[1].cancelled() or asked[1].exception() is not None)):
            asked[1].cancel()
            return None
        return asked[1]

    def drop(self) -> None:
        """Break off what is leaving, and ask for nothing."""
        if self._present is not None:
            self._present.break_off()
        if self._pull is not None:
            self._pull[1].cancel()
        self._present = self._pull = None
