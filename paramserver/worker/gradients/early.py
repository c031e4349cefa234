"""A contribution that leaves while the backward pass still computes it: chunk by chunk, as gradients become ready.

Nothing is taken on trust. Each upload ends only when the script has called ``optimizer.step()`` and every gradient has
turned out to be, bit for bit, what was sent; until then servers count nothing of it. If the script has changed a
gradient meanwhile (clipped it, added to it), the uploads break off and the contribution is pushed as if there had been
none of this.
"""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, replace

from paramserver.core.layout.thresholds import EARLY_PUSH_BYTES
from paramserver.core.versions.names import AsyncName
from paramserver.worker.background import Background
from paramserver.worker.flat import PartialSum, PartialSumPool
from paramserver.worker.gradients.contribution import PushFacts
from paramserver.worker.gradients.leaving import EarlyChunks
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.pushes import Outcomes
from paramserver.worker.weights.pulled import Pulled

# Below this a contribution is not worth it: a push of it is over as soon as it begins.
LEAST_BYTES = EARLY_PUSH_BYTES


@dataclass(frozen=True, slots=True)
class Early:
    """A contribution that has begun to leave. ``partial`` is filled by the script's thread."""

    partial: PartialSum
    facts: PushFacts
    chunks: EarlyChunks
    push: concurrent.futures.Future[Outcomes]
    pool: PartialSumPool

    def give_back(self) -> None:
        """The memory of the partial sum goes back to the pool once the push is over; the script is done with it."""
        self.push.add_done_callback(lambda _: self.pool.give(self.partial))

    def break_off(self) -> None:
        """The contribution is not wanted: cancel its push and return its memory."""
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
        push = self._background.submit(links.pushes.push(facts, partial.space.read, chunks))
        self._present = Early(partial, facts, chunks, push, pool)
        if isinstance(facts.name, AsyncName):  # what it leads to depends on others, too
            return chunks
        version = min(facts.base_versions) + 1
        self._pull = version, self._background.submit(links.pulls.pull_version(version, ahead=True, begin=begin_pull))
        return chunks

    def complete(self, partial: PartialSum, facts: PushFacts) -> concurrent.futures.Future[Outcomes] | None:
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
