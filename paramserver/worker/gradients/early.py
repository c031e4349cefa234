"""A contribution that leaves while the backward pass still computes it, chunk by chunk, as gradients become ready.

An upload ends only when the script has called ``optimizer.step()`` and every gradient is, bit for bit, the gradient
that was sent. Until then servers do not count the contribution. If the script has changed a gradient meanwhile (clipped
it, added to it), the uploads break off, and the contribution is pushed after the backward pass.
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

# A smaller contribution does not leave early: its push ends as soon as it begins.
LEAST_BYTES = EARLY_PUSH_BYTES


@dataclass(frozen=True, slots=True)
class Early:
    """A contribution that has begun to leave. ``partial`` is filled by the script's thread."""

    partial: PartialSum
    facts: PushFacts
    chunks: EarlyChunks
    push: concurrent.futures.Future[Outcomes]
    pool: PartialSumPool

    def break_off(self) -> None:
        """The contribution is not wanted: cancel its push and return its memory."""
        self.push.cancel()
        self.push.add_done_callback(lambda _: self.pool.give(self.partial))


class EarlyPushes:
    """At most one contribution of a worker that is leaving early, and the pull of the version that it leads to."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._present: Early | None = None
        self._pull: tuple[int, concurrent.futures.Future[list[Pulled]]] | None = None

    def begin(
        self, links: ShardLinks, partial: PartialSum, facts: PushFacts, pool: PartialSumPool, begin_pull: bool = False
    ) -> EarlyChunks:
        """Begin to push a contribution to all shards. The memory of ``partial`` returns to the pool if it breaks off.

        ``begin_pull``: the script may begin with the first weights of the pulled version.
        """
        self.drop()
        chunks = EarlyChunks(links.plan, facts.used, self._background.loop)
        push = self._background.submit(links.pushes.push(facts, partial.space.read, chunks))
        self._present = Early(partial, facts, chunks, push, pool)
        if isinstance(facts.name, AsyncName):  # the next version depends on other workers, too
            return chunks
        version = min(facts.base_versions) + 1
        self._pull = version, self._background.submit(links.pulls.pull_version(version, ahead=True, begin=begin_pull))
        return chunks

    def complete(self, partial: PartialSum, facts: PushFacts) -> concurrent.futures.Future[Outcomes] | None:
        """The push of this contribution, if it is leaving early; the push of another contribution breaks off.

        None: ``partial`` belongs to the caller again.
        """
        early, self._present = self._present, None
        if early is None:
            return None
        if partial is early.partial and replace(facts, nonce=early.facts.nonce) == early.facts:
            early.chunks.seal()
            return early.push
        if partial is early.partial:
            early.push.cancel()
        else:
            early.break_off()
        return None

    def has(self, partial: PartialSum) -> bool:
        """Whether this partial sum is leaving early."""
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
        """Break off the early push and its pull."""
        if self._present is not None:
            self._present.break_off()
        if self._pull is not None:
            self._pull[1].cancel()
        self._present = self._pull = None
