"""How contributions leave: all at once, while they are computed, or with a pull in one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from paramserver import errors
from paramserver.core.layout.plan import moving_bytes
from paramserver.core.versions.names import Name, SyncName
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.worker.device import Ticket
from paramserver.worker.engine.weights import Weights
from paramserver.worker.flat import PartialSum
from paramserver.worker.gradients import early
from paramserver.worker.gradients.contribution import PushFacts
from paramserver.worker.gradients.leaving import EarlyChunks
from paramserver.worker.gradients.outgoing import ANY, Encoded
from paramserver.worker.links import exchange as exchanges
from paramserver.worker.pace import AsyncPace, Item

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
# How long a worker that leaves waits for the push that is under way.
LAST_PUSH_S = 5.0


class Pushes(Weights):
    """Brings what slices have yielded."""

    def push(
        self, name: Name, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], clock: int, flush: bool = False
    ) -> concurrent.futures.Future[frozenset[shard_pb2.Outcome]]:
        """Begin to bring a contribution to all shards; its memory is reused afterwards.

        ``flush``: nothing of it is left for later ones. Raises what `Outgoing.encode` raises.
        """
        self._wait_for_copy()
        ticket, pool = None, self.pool
        if self._staging is not None:
            of_device, pool = partial, self._staging.pool
            partial, ticket = self._staging.fetch(partial)
            if self.outgoing.lossy:
                ticket.wait()
        space = partial.space
        position = name.lo if isinstance(name, SyncName) else ANY
        encoded = self.outgoing.encode(position, partial, space, flush) if self.outgoing.lossy else {}
        facts = self._facts(name, partial, groups, clock, encoded)
        begun = self._early.complete(partial, facts)
        future = begun or self.background.submit(_when(ticket, self.links.pushes.push(facts, space.read)))
        self._pushing.add(future)
        if not self.named_by_data:
            self.handed.pushed(future)
        future.add_done_callback(self._pushing.discard)
        if begun is not None:  # gives the memory back itself
            return future
        if self._staging is not None:
            gpu = self.pool
            future.add_done_callback(lambda _: gpu.give(of_device))
        if space.number is None:
            future.add_done_callback(lambda _: pool.give(partial))
        elif isinstance(name, SyncName):  # servers read it when they have all of the step
            pool.lend(partial, name.step, future.done)
        else:  # answered when it is in a version; after an error a server may still be about to read it
            future.add_done_callback(lambda done: pool.give(partial) if _succeeded(done) else None)
        return future

    def exchange(
        self, name: SyncName, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], patience_s: float
    ) -> bool | None:
        """Push a contribution, and wait so long for the version that it is the last one of; both without the loop.

        True: the version is installed. False: the contribution is counted. None: it has to be pushed, as ever.
        """
        if self._staging is not None or self.outgoing.lossy or self.rolled_back() or not self.session.goes_on:
            return None
        wait_s = min(patience_s, exchanges.MOST_S)
        self._waiting += 1
        try:
            found = exchanges.exchange(self.links, self._facts(name, partial, groups, 0, {}), name.step + 1, wait_s)
        finally:
            self._waiting -= 1
        if found is False:
            return None
        self.pool.lend(partial, name.step, lambda: True)
        if found is True:
            return False
        self._install(found)
        return True

    def begin_early(
        self, item: Item, samples: int, used: frozenset[int], groups: Callable[[], Sequence[types_pb2.GroupHypers]]
    ) -> tuple[PartialSum, EarlyChunks] | None:
        """Begin to push what ``item`` is going to yield, while it is computed; None where that is not possible.

        ``used``: the tensors of which it is expected to have gradients or changes. Returns the partial sum to
        fill, which :meth:`contribute` must get, and the object that is told of each tensor in it.
        """
        pace = self._pace
        possible = (
            pace is not None
            and pace.alone(item)
            and self.named_by_data
            and self.links.near.shared is None
            and not self.outgoing.lossy
            and self.pool.device.type == "cpu"
            and bool(used)
            and not self.rolled_back()
            and moving_bytes(self.links.plan.layout.chunks) >= early.LEAST_BYTES
        )
        if pace is None or not possible:
            return None
        partial = self.pool.take()
        partial.samples = samples
        clock = pace.clock if isinstance(pace, AsyncPace) else 0
        facts = self._facts(item.name, partial, groups(), clock, {}, used)
        return partial, self._early.begin(self.links, partial, facts, self.pool, self._may_begin)

    def discard(self, partial: PartialSum) -> None:
        """Give back the memory of a partial sum that is not contributed."""
        if self._early.has(partial):
            self._early.drop()
        else:
            self.pool.give(partial)

    def keep_residuals(self, positions: range) -> None:
        """These slice positions belong to this worker; what was left out of contributions to others is lost."""
        if self.outgoing.keep(positions) and not self.rolled_back():
            log.warning(
                "the workers have changed: what compression had left out of some contributions is lost, so the result "
                "will have other bits than that of an undisturbed run (see docs/compression.md)"
            )

    def wait_all(self, pushes: Sequence[concurrent.futures.Future[frozenset[shard_pb2.Outcome]]]) -> bool:
        """Wait for several pushes; raises the first error. False if, without a data set, one was not counted."""
        return all([self._counted(push) for push in pushes])

    def _counted(self, push: concurrent.futures.Future[frozenset[shard_pb2.Outcome]]) -> bool:
        try:
            outcomes = self._watch(push, last_s=LAST_PUSH_S)
        except errors.StaleViewError as error:
            if type(error) is not errors.StaleViewError:
                raise
            # The mode has changed before this one arrived; with a data set, what it brought has been done by others.
            log.info("a contribution came too late", reason=str(error))
            return self.named_by_data
        if self.named_by_data or outcomes == {shard_pb2.OUTCOME_ACCEPTED}:
            return True
        if outcomes == {shard_pb2.OUTCOME_DUPLICATE}:
            return False
        raise errors.ParamServerError(
            "somebody joined or left at this moment, and only some of the servers have counted this push: "
            "pull to see what is there, and push what is missing"
        )

    def _facts(
        self,
        name: Name,
        partial: PartialSum,
        groups: Sequence[types_pb2.GroupHypers],
        clock: int,
        encoded: Mapping[int, Encoded],
        used: frozenset[int] | None = None,
    ) -> PushFacts:
        """What is said of a contribution. ``used``: what it is going to have, if it is not complete yet."""
        present = frozenset() if partial.overflow else frozenset(partial.used)
        return PushFacts(
            name=name,
            samples=partial.samples,
            overflow=partial.overflow,
            used=present if used is None else used,
            groups=groups,
            base_versions=list(self._versions),
            clock=clock,
            schedule=self.schedule,
            clip_norm=self.clip_norm if isinstance(name, SyncName) else 0.0,
            nonce=secrets.randbits(63) | 1,
            slot=partial.space.number,
            encoded=encoded,
        )


async def _when(ticket: Ticket | None, push: Coroutine[Any, Any, T]) -> T:
    """Push what has been copied by then."""
    try:
        if ticket is not None:
            await asyncio.get_running_loop().run_in_executor(None, ticket.wait)
    except BaseException:
        push.close()
        raise
    return await push


def _succeeded(future: concurrent.futures.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None
