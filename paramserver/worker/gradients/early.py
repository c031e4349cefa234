"""A contribution that leaves while the backward pass still computes it, chunk by chunk, as gradients become ready.

It is sealed only when the script has called ``optimizer.step()`` and every gradient is, bit for bit, the gradient that
was sent. If the script has changed a gradient meanwhile (clipped it, added to it), the contribution is aborted, and is
pushed after the backward pass.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass, replace

from paramserver.core.layout.thresholds import EARLY_PUSH_BYTES
from paramserver.core.versions.names import AsyncName
from paramserver.worker.background import Background
from paramserver.worker.flat import PartialSum, PartialSumPool
from paramserver.worker.gradients.contribution import Outcomes, PushFacts
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.gradients.staging import Copying
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.pulls import Pull
from paramserver.worker.memory.places import Places
from paramserver.worker.weights.pulled import Pulled

# A smaller contribution does not leave early: its push ends as soon as it begins.
LEAST_BYTES = EARLY_PUSH_BYTES


@dataclass(frozen=True, slots=True)
class Early:
    """A contribution that has begun to leave. ``partial`` is filled by the script's thread.

    ``copies``: of a model on a device, the copy in main memory and the pool of such copies.
    """

    partial: PartialSum
    leaving: Leaving
    push: concurrent.futures.Future[Outcomes]
    pool: PartialSumPool
    copies: tuple[Copying, PartialSumPool] | None

    def break_off(self) -> None:
        """The contribution is not wanted: abort it and return its memory."""
        self.leaving.abort()
        if self.copies is not None:
            copying, pool = self.copies
            copying.wait()
            self.push.add_done_callback(lambda _: pool.give(PartialSum(copying.space)))
        self.push.add_done_callback(lambda _: self.pool.give(self.partial))


class EarlyPushes:
    """At most one contribution of a worker that is leaving early, and the pull of the version that it leads to."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._present: Early | None = None
        self._pull: tuple[int, concurrent.futures.Future[list[Pulled]]] | None = None

    def begin(
        self,
        links: ShardLinks,
        partial: PartialSum,
        facts: PushFacts,
        places: Places,
        next_pull: Callable[[int], Pull],
    ) -> Leaving:
        """Begin to push a contribution to all shards. Its memory returns to its pool in ``places`` if it breaks off.

        ``next_pull``: the question for a version.
        """
        self.drop()
        if places.staging is None:
            copies, leaving = None, Leaving(links.plan, facts, partial.space.read)
        else:
            copying = places.staging.begin(partial)
            copies = copying, places.staging.pool
            leaving = Leaving(links.plan, facts, copying.space.read, copying.begin)
        push = leaving.begin(self._background, links.pushes.push(leaving))
        self._present = Early(partial, leaving, push, places.pool, copies)
        if isinstance(facts.name, AsyncName):  # the next version depends on other workers, too
            return leaving
        version = min(facts.base_versions) + 1
        self._pull = version, self._background.submit(links.pulls.ask(next_pull(version)))
        return leaving

    def complete(self, partial: PartialSum, facts: PushFacts) -> Leaving | None:
        """This contribution, if it is leaving early and can be sealed; another contribution breaks off.

        None: ``partial`` belongs to the caller again.
        """
        early, self._present = self._present, None
        if early is None:
            return None
        if partial is not early.partial:
            early.break_off()
            return None
        announced = early.leaving.facts
        if replace(facts, nonce=announced.nonce) == announced:
            return early.leaving
        early.leaving.abort()
        return None

    def copying(self, partial: PartialSum) -> Copying | None:
        """The copy in main memory of this partial sum, if it is leaving early from a device."""
        early = self._present
        return early.copies[0] if early is not None and early.partial is partial and early.copies is not None else None

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
