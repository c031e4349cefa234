"""How contributions leave: after they were computed, while they are computed, or together with a pull."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from paramserver import errors
from paramserver.compress.options import Wire
from paramserver.core.layout.plan import moving_bytes
from paramserver.core.versions.advances import Advances
from paramserver.core.versions.names import Name, SyncName
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.worker.device import Ticket
from paramserver.worker.flat import PartialSum, PartialSumPool
from paramserver.worker.gradients import early
from paramserver.worker.gradients.contribution import Outcomes, PushFacts
from paramserver.worker.gradients.foresight import Foresight
from paramserver.worker.gradients.handed import HandedIn
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.gradients.outgoing import ANY, Encoded, Outgoing
from paramserver.worker.job.member import Member
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.links import exchange as exchanges
from paramserver.worker.memory.places import Places
from paramserver.worker.weights.pulled import Pulled
from paramserver.worker.weights.weights import Weights

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
PushFuture = concurrent.futures.Future[Outcomes]
# How long a worker that leaves waits for the push that is under way.
_LAST_PUSH_S = 5.0


class Sender:
    """Brings contributions to the servers. Belongs to the script's thread."""

    def __init__(self, member: Member, shards: Shards, slices: Slices, places: Places, weights: Weights) -> None:
        self._member, self._shards, self._slices = member, shards, slices
        self._places, self._weights = places, weights
        self.handed = HandedIn()
        self.outgoing = Outgoing()
        self.foresight = Foresight()
        self._early = early.EarlyPushes(member.background)
        # The partial sum that leaves while it is computed, until the script has stepped.
        self._filling: PartialSum | None = None
        self._pushing: set[PushFuture] = set()
        # See `PushHeader.advances`.
        self._advances = Advances().encode()
        # The global norm to which the gradient of the present step is clipped; 0: the gradient is not clipped.
        self.clip_norm = 0.0

    # ---- facts that go with contributions

    def compress(self, wire: Wire) -> None:
        """Before there is a model: how gradients travel."""
        self.outgoing = Outgoing(wire)
        self._member.keep_place(self.outgoing.keeps)

    def advances(self, advances: str) -> None:
        """Which schedulers this script advances in steps and between epochs, encoded; empty: that is not known yet."""
        self._advances = advances

    def clip_to(self, norm: float) -> None:
        """The servers are to clip the gradient of the present step to this global norm; 0: they do not clip."""
        self.clip_norm = norm

    def keep_residuals(self, positions: range) -> None:
        """These slice positions belong to this worker; residuals of other positions are lost."""
        if self.outgoing.keep(positions) and not self._member.rolled_back():
            log.warning(
                "the workers have changed: what compression had left out of some contributions is lost, so the result "
                "will have other bits than that of an undisturbed run (see docs/compression.md)"
            )

    # ---- pushing

    def push(
        self, name: Name, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], clock: int, flush: bool
    ) -> PushFuture:
        """Begin to bring a contribution to all shards; its memory is reused when no server needs it any more.

        ``flush``: nothing of it is left for later ones. Raises what `Outgoing.encode` raises.
        """
        self._weights.end_copy()
        staging, of_device, ticket, pool = self._places.staging, partial, None, self._places.pool
        if staging is not None:
            pool, copying = staging.pool, self._early.copying(of_device)
            partial, ticket = staging.fetch(of_device) if copying is None else copying.finish()
            if self.outgoing.lossy:
                ticket.wait()
        space = partial.space
        position = name.lo if isinstance(name, SyncName) else ANY
        encoded = self.outgoing.encode(position, partial, space, flush) if self.outgoing.lossy else {}
        facts = self._facts(name, partial, groups, clock, encoded)
        links = self._shards.links
        leaving = self._early.complete(of_device, facts) or Leaving(links.plan, facts, space.read)
        leaving.seal(ticket if leaving.push is not None else None)
        future = leaving.push or leaving.begin(self._member.background, _when(ticket, links.pushes.push(leaving)))
        self._pushing.add(future)
        if not self._slices.named_by_data:
            self.handed.pushed(future)
        future.add_done_callback(self._pushing.discard)
        if staging is not None:
            gpu = self._places.pool
            future.add_done_callback(lambda _: gpu.give(of_device))
        if isinstance(name, SyncName):  # read by servers, or sent again to a shard that moves, until the step is done
            pool.lend(partial, name.step, future.done)
        elif space.number is None:
            future.add_done_callback(lambda _: pool.give(partial))
        else:  # answered when it is in a version; after an error a server may still be about to read it
            future.add_done_callback(lambda done: pool.give(partial) if _succeeded(done) else None)
        return future

    def exchange(
        self, name: SyncName, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], patience_s: float
    ) -> bool | None:
        """Push a contribution and wait up to ``patience_s`` seconds for the next version, without the loop.

        True: the version is installed. False: the contribution is counted. None: the contribution has to be pushed.
        """
        member, links = self._member, self._shards.links
        if self.outgoing.lossy or member.rolled_back() or not member.session.goes_on:
            return None
        if self._places.staging is not None and not exchanges.possible(links):  # else a copy would be made in vain
            return None
        wait_s = min(patience_s, exchanges.MOST_S)
        channels = list(links.channels)
        with member.waiting():
            pool, sent = self._in_main_memory(partial)
            leaving = Leaving(links.plan, self._facts(name, sent, groups, 0, {}), sent.space.read)
            leaving.seal()
            found = exchanges.exchange(links, leaving, name.step + 1, wait_s)
        if found is False:
            if sent is not partial:
                pool.give(sent)
            return None
        pool.lend(sent, name.step, lambda: True)
        if sent is not partial:
            self._places.pool.give(partial)
        if found is True:
            member.submit(links.pushes.exchanged(leaving, channels))
            return False
        self._weights.install(found)
        return True

    def _in_main_memory(self, partial: PartialSum) -> tuple[PartialSumPool, PartialSum]:
        """A partial sum, or a device's whole copy of it in main memory, and the pool that this memory belongs to."""
        staging = self._places.staging
        if staging is None:
            return self._places.pool, partial
        self._weights.end_copy()
        copy, ticket = staging.fetch(partial)
        ticket.wait()
        return staging.pool, copy

    def discard(self, partial: PartialSum) -> None:
        """This partial sum is not contributed."""
        if self._early.has(partial):
            self._early.drop()
        else:
            self._places.pool.give(partial)

    # ---- contributions that leave while they are computed

    def begin_early(
        self, name: Name, alone: bool, clock: int, samples: int, groups: Callable[[], Sequence[types_pb2.GroupHypers]]
    ) -> tuple[PartialSum, Leaving] | None:
        """Begin to push a contribution while it is computed; None where that is not possible.

        ``alone``: no other contribution is added to it before the push. Returns the partial sum to fill, which the
        caller contributes or discards, and the object to tell of each tensor in it.
        """
        used = self.foresight.of_next()
        links, pool = self._shards.links, self._places.pool
        possible = (
            alone
            and bool(used)
            and self._slices.named_by_data
            and links.near.shared is None
            and not (links.host is not None and links.host.shares)  # its sum with others leaves when all are computed
            and not self.outgoing.lossy
            and not self._member.rolled_back()
            and moving_bytes(links.plan.layout.chunks) >= early.LEAST_BYTES
        )
        if not possible:
            return None
        partial = pool.take()
        partial.samples = samples
        partial.clear_but(used)
        facts = self._facts(name, partial, groups(), clock, {}, used)
        self.foresight.said(used, facts.groups, self.clip_norm)
        self._filling = partial
        return partial, self._early.begin(links, partial, facts, self._places, self._weights.next_pull)

    def take_early(self) -> PartialSum | None:
        """The partial sum that the script fills while it leaves, once; the caller contributes or discards it."""
        partial, self._filling = self._filling, None
        return partial

    def drop_early(self) -> None:
        """Break off the contribution that is leaving while it is computed."""
        self._early.drop()

    # ---- answers

    def begin_pull(self, version: int) -> concurrent.futures.Future[list[Pulled]]:
        """Ask every shard for ``version`` or a later one, if that was not done already with an early push."""
        self._weights.end_copy()
        begun = self._early.pull(version)
        if begun is not None:
            return begun
        return self._member.submit(self._shards.links.pulls.ask(self._weights.next_pull(version)))

    def wait_all(self, pushes: Sequence[PushFuture]) -> bool:
        """Wait for several pushes; raises the first error. False if, without a data set, one was not counted."""
        return all([self._counted(push) for push in pushes])

    def _counted(self, push: PushFuture) -> bool:
        try:
            outcomes = self._member.wait(push, last_s=_LAST_PUSH_S)
        except errors.StaleViewError as error:
            if type(error) is not errors.StaleViewError:
                raise
            # The mode has changed before this push arrived. With a data set, other workers have computed its slice.
            log.info("a contribution came too late", reason=str(error))
            return self._slices.named_by_data
        if self._slices.named_by_data or outcomes == {shard_pb2.OUTCOME_ACCEPTED}:
            return True
        if outcomes == {shard_pb2.OUTCOME_DUPLICATE}:
            return False
        raise errors.ParamServerError(
            "a worker joined or left at this moment, and only some of the servers have counted this push: "
            "pull to see what is there, and push what is missing"
        )

    def cancel(self) -> None:
        """The job goes back: cancel the pushes that are under way."""
        for push in list(self._pushing):
            push.cancel()

    async def last_pushes(self, timeout_s: float) -> None:
        """Wait a little for the pushes under way, so that no shard has a slice that another shard lacks."""
        under_way = [asyncio.wrap_future(push) for push in list(self._pushing) if not push.done()]
        if under_way:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, _LAST_PUSH_S)):
                    await asyncio.gather(*under_way, return_exceptions=True)

    def _facts(
        self,
        name: Name,
        partial: PartialSum,
        groups: Sequence[types_pb2.GroupHypers],
        clock: int,
        encoded: Mapping[int, Encoded],
        used: frozenset[int] | None = None,
    ) -> PushFacts:
        """The facts about a contribution. ``used``: its tensors, if the contribution is not complete yet."""
        present = frozenset() if partial.overflow else frozenset(partial.used)
        return PushFacts(
            name=name,
            samples=partial.samples,
            overflow=partial.overflow,
            used=present if used is None else used,
            groups=groups,
            base_versions=list(self._weights.versions),
            clock=clock,
            advances=self._advances,
            clip_norm=self.clip_norm if isinstance(name, SyncName) else 0.0,
            nonce=secrets.randbits(63) | 1,
            slot=partial.space.number,
            encoded=encoded,
            by_data=self._slices.named_by_data,
        )


async def _when(ticket: Ticket | None, push: Coroutine[Any, Any, T]) -> T:
    """Push when the device's copy is complete."""
    try:
        if ticket is not None:
            await asyncio.get_running_loop().run_in_executor(None, ticket.wait)
    except BaseException:
        push.close()
        raise
    return await push


def _succeeded(future: concurrent.futures.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None
