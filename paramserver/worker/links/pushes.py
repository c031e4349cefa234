"""Brings contributions, and version 0, to all shards at once. The error of a push names the shards without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Chunk
from paramserver.core.versions.names import SyncName
from paramserver.core.work.unpublished import Unpublished
from paramserver.failpoints import planned, reach
from paramserver.tensors.codec import chunk_frames
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref, pack_mask, put_name
from paramserver.worker.gradients.contribution import Outcomes, PushFacts
from paramserver.worker.gradients.flow_control import Flow, FlowControl
from paramserver.worker.gradients.leaving import Leaving, Read
from paramserver.worker.links.near import Near
from paramserver.worker.links.targets import Targets
from paramserver.worker.links.traced import TracedPush

if TYPE_CHECKING:
    from paramserver.worker.host.tier import HostTier
    from paramserver.worker.memory.shared import Attached

log = structlog.get_logger("paramserver.worker")

# A piece of optimizer state, and its bytes.
Part = tuple[shard_pb2.StateRef, memoryview]


class Pushes:
    """Pushes to all shards, with retries. A shard that moves gets again what its former server had counted."""

    def __init__(self, targets: Targets, near: Near, flow_control: FlowControl) -> None:
        self._targets, self._near, self._flow_control = targets, near, flow_control
        self._workers = 1
        # The one push of this host; None where each worker pushes by itself.
        self.host: HostTier | None = None
        self._unpublished: Unpublished[Leaving] = Unpublished()

    def shared_by(self, workers: int) -> None:
        """So many workers share a step, and the links of the servers."""
        self._workers = workers

    async def push(self, leaving: Leaving) -> Outcomes:
        """Bring a contribution to every shard, as far as it is ready; wait until it is sealed and counted everywhere.

        Returns when every shard has counted it or had it already; the outcomes that there were. A worker that shares
        the push of its host may have another one bring it, in a sum.
        """
        if self.host is not None and await self.host.offer(leaving):
            return frozenset([shard_pb2.OUTCOME_ACCEPTED])
        return await self.by_itself(leaving)

    async def by_itself(self, leaving: Leaving) -> Outcomes:
        """See :meth:`push`, without the help of others."""
        facts = leaving.facts
        between = asyncio.Lock() if planned("worker.between_shards") else None
        shards = len(self._targets)
        first = 0 if between else self._targets.worker() % shards  # not all workers at the same server
        bytes_of = [sum(chunk.nbytes for chunk in self._wanted(shard, facts)) for shard in range(shards)]
        with self._flow_control.leaving(facts.nonce, bytes_of, first, self._workers):
            tasks = {
                shard: asyncio.ensure_future(self._push_in_turn(shard, leaving, between))
                for shard in (*range(first, shards), *range(first))
            }
            try:
                results = await asyncio.gather(*(tasks[shard] for shard in range(shards)), return_exceptions=True)
            except asyncio.CancelledError:
                self._unpublished.dropped(facts.nonce)
                raise
        failed = [(s, r) for s, r in enumerate(results) if isinstance(r, BaseException)]
        if failed:
            shard, error = failed[0]
            if len(failed) == 1 or not isinstance(error, errors.ParamServerError):
                raise error
            names = self._targets.names
            which = ", ".join(names[s] for s, _ in failed)
            raise type(error)(f"{facts.name} did not reach {which}; {names[shard]} said: {error}") from error
        return frozenset(cast(list[shard_pb2.Outcome], results))

    def _wanted(self, shard: int, facts: PushFacts) -> list[Chunk]:
        """The chunks of a shard for which there are gradients or changes."""
        return [chunk for chunk in self._targets.plan.chunks_of(shard) if chunk.uses(facts.used)]

    async def _push_in_turn(self, shard: int, leaving: Leaving, between: asyncio.Lock | None) -> shard_pb2.Outcome:
        """Push to one shard; if a fault is planned between two shards, only after the push to the previous one."""
        if between is None:
            return await self._push_one(shard, leaving)
        await leaving.whole()
        async with between:
            outcome = await self._push_one(shard, leaving)
            if shard + 1 < len(self._targets):
                reach("worker.between_shards", leaving.facts.base_versions[shard])
            return outcome

    async def _push_one(self, shard: int, leaving: Leaving) -> shard_pb2.Outcome:
        targets, facts = self._targets, leaving.facts
        flow, again = self._flow_control.flow(facts.nonce), False
        lies = facts.slot is not None and self._near.shared is not None

        async def attempt(timeout_s: float) -> shard_pb2.PushResponse:
            nonlocal flow, again
            mine, flow = flow, None  # only the first attempt
            if again or lies:
                await leaving.whole()
            again = True
            if lies:
                await self._near.attach_again(shard, timeout_s)
            channel = targets.channels[shard]
            attached = self._near.attached(shard) if lies else None
            if attached is None:
                reply = await self._upload(shard, leaving, channel, mine, timeout_s)
            else:
                try:
                    reply = await self._hand_over(shard, facts, attached, timeout_s)
                except errors.GoneError:
                    if self._near.attached(shard) is attached:
                        await self._near.lost(shard)
                    return await attempt(timeout_s)
            targets.still(shard, channel)
            return reply

        reply = await targets.persist(shard, f"to push {facts.name}", attempt, targets.nbytes[shard])
        outcome = shard_pb2.OUTCOME_ACCEPTED if reply.own else reply.outcome
        self._counted(shard, leaving, outcome)
        return outcome

    async def _upload(
        self, shard: int, leaving: Leaving, channel: Channel, flow: Flow | None, timeout_s: float
    ) -> shard_pb2.PushResponse:
        """Push the chunks of a contribution, as they are ready. ``timeout_s`` counts when all are ready."""
        targets, facts = self._targets, leaving.facts
        wanted = self._wanted(shard, facts)
        frames = leaving.frames(self.push_header(shard, facts, len(wanted), None), wanted, apart=flow is not None)
        if not leaving.sealed:
            timeout_s = targets.wait_timeout_s
        traced = TracedPush(targets.trace, targets.names[shard], facts) if targets.trace.on else None
        if traced is not None:
            frames = traced.frames(frames)
        if flow is None:
            reply = await channel.upload("Shard.Push", frames, timeout=timeout_s)
        else:
            async with aclosing(flow.keep(shard, frames)) as kept:
                reply = await channel.upload("Shard.Push", kept, timeout=timeout_s)
        if traced is not None:
            traced.answered()
        return cast(shard_pb2.PushResponse, reply)

    async def _hand_over(
        self, shard: int, facts: PushFacts, attached: Attached, timeout_s: float
    ) -> shard_pb2.PushResponse:
        """Push a contribution that the server reads in this worker's inbox."""
        request = shard_pb2.ExchangeRequest(push=self.push_header(shard, facts, 0, attached))
        traced = TracedPush(self._targets.trace, self._targets.names[shard], facts) if self._targets.trace.on else None
        if traced is not None:
            traced.left(0)
        reply = await attached.channel.call("Shard.Exchange", request, timeout=timeout_s)
        if traced is not None:
            traced.answered()
        return cast(shard_pb2.ExchangeResponse, reply).pushed

    # ---- contributions that are counted, and in no version yet

    def _counted(self, shard: int, leaving: Leaving, outcome: shard_pb2.Outcome) -> None:
        """The present server of a shard has answered a push.

        Where names do not determine contributions, the script hears of a duplicate, and such a one must never count.
        """
        facts = leaving.facts
        if isinstance(facts.name, SyncName) and (facts.by_data or outcome == shard_pb2.OUTCOME_ACCEPTED):
            self._unpublished.counted(facts.nonce, facts.name.step, shard, leaving)

    async def exchanged(self, leaving: Leaving, channels: Sequence[Channel]) -> None:
        """The thread that trains has brought a contribution to the servers at the end of ``channels`` (by shard)."""
        for shard, channel in enumerate(channels):
            if self._targets.channels[shard] is channel:
                self._counted(shard, leaving, shard_pb2.OUTCOME_ACCEPTED)
            else:
                self._targets.beside(self._push_again(shard, leaving))

    def published(self, version: int) -> None:
        """All shards have published ``version``. From any thread."""
        self._unpublished.published(version)

    def moved(self, shard: int) -> None:
        """Another server has this shard: bring the contributions again that the former one had counted."""
        for leaving in self._unpublished.moved(shard):
            self._targets.beside(self._push_again(shard, leaving))

    async def _push_again(self, shard: int, leaving: Leaving) -> None:
        facts = leaving.facts
        try:
            outcome = await self._push_one(shard, leaving)
        except errors.FencedError:  # the job goes on elsewhere
            return
        except errors.ParamServerError as error:
            name, reason = str(facts.name), str(error)
            log.warning("a shard that has moved took a contribution not again", what=name, shard=shard, reason=reason)
            return
        if outcome == shard_pb2.OUTCOME_DUPLICATE and not facts.by_data:
            name = str(facts.name)
            log.warning("another worker's contribution counts in a shard that has moved", what=name, shard=shard)

    def push_header(self, shard: int, facts: PushFacts, chunks: int, attached: Attached | None) -> shard_pb2.PushHeader:
        """The header of a contribution. ``chunks`` follow, unless the ``attached`` server reads them in place."""
        header = shard_pb2.PushHeader(
            job=self._targets.job,
            timeline=self._targets.timeline,
            worker=self._targets.worker(),
            samples=facts.samples,
            overflow=facts.overflow,
            base_version=facts.base_versions[shard],
            clock=facts.clock,
            advances=facts.advances,
            clip_norm=facts.clip_norm,
            nonce=facts.nonce,
            used=pack_mask(facts.used, len(self._targets.plan.layout.tensors)),
            groups=facts.groups,
            chunks=0 if attached is not None else chunks,
        )
        put_name(header, facts.name)
        if attached is not None:  # the contribution was looked through for NaN
            header.shared.attachment, header.shared.slot, header.shared.checked = attached.number, facts.slot or 0, True
        return header

    async def initialize(
        self,
        grant: int,
        read: Read | None,
        state: Callable[[Sequence[Chunk]], list[Part]] | None,
    ) -> None:
        """Upload version 0 to every shard. ``state`` gives the optimizer state that goes with chunks.

        Without weights or without state (for ``ctx.load``) shards keep their own.
        """

        async def one(shard: int) -> None:
            chunks = self._targets.plan.chunks_of(shard) if read is not None else ()
            states = state(self._targets.plan.chunks_of(shard)) if state is not None else []

            async def attempt(timeout_s: float) -> None:
                channel = self._targets.channels[shard]
                header = shard_pb2.InitializeHeader(
                    job=self._targets.job,
                    timeline=self._targets.timeline,
                    grant=grant,
                    worker=self._targets.worker(),
                    chunks=len(chunks),
                    states=len(states),
                    keep_weights=read is None,
                    keep_states=state is None,
                )
                weights = ((chunk_ref(chunk), read(chunk.index)) for chunk in chunks if read is not None)
                frames = chunk_frames(header, (*weights, *states))
                await channel.upload("Shard.Initialize", frames, timeout=timeout_s)
                self._targets.still(shard, channel)

            nbytes = self._targets.nbytes[shard] + sum(ref.bytes for ref, _ in states)
            await self._targets.persist(shard, "to upload version 0", attempt, nbytes)

        await asyncio.gather(*(one(shard) for shard in range(len(self._targets))))
