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
from paramserver.transport.base import Channel, Frames, each
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref, pack_mask, put_name
from paramserver.worker.gradients.contribution import PushFacts, frames_as_ready, frames_of
from paramserver.worker.gradients.flow_control import Flow, FlowControl
from paramserver.worker.gradients.leaving import EarlyChunks
from paramserver.worker.links.near import Near
from paramserver.worker.links.targets import Targets
from paramserver.worker.links.traced import TracedPush

if TYPE_CHECKING:
    from paramserver.worker.memory.shared import Attached

log = structlog.get_logger("paramserver.worker")

# Of one push to all shards: the outcomes that there were.
Outcomes = frozenset[shard_pb2.Outcome]
# A piece of optimizer state, and its bytes.
Part = tuple[shard_pb2.StateRef, memoryview]
# The bytes of a chunk by its index.
Read = Callable[[int], memoryview]


class Pushes:
    """Pushes to all shards, with retries. A shard that moves gets again what its former server had counted."""

    def __init__(self, targets: Targets, near: Near, flow_control: FlowControl) -> None:
        self._targets, self._near, self._flow_control = targets, near, flow_control
        self._workers = 1
        self._unpublished: Unpublished[tuple[PushFacts, Read]] = Unpublished()

    def shared_by(self, workers: int) -> None:
        """So many workers share a step, and the links of the servers."""
        self._workers = workers

    async def push(self, facts: PushFacts, read: Read, early: EarlyChunks | None = None) -> Outcomes:
        """Bring a contribution to every shard. ``read`` gives the bytes of a chunk by its index.

        ``early``: the contribution is still being computed, and this object tells which chunks are ready. The bytes of
        a synchronous contribution stay as they are until a later version is published, or the push is cancelled.

        Returns when every shard has counted it or had it already; the outcomes that there were.
        """
        between = asyncio.Lock() if planned("worker.between_shards") else None
        shards = len(self._targets)
        first = 0 if between else self._targets.worker() % shards  # not all workers at the same server
        bytes_of = [sum(chunk.nbytes for chunk in self._wanted(shard, facts)) for shard in range(shards)]
        with self._flow_control.leaving(facts.nonce, bytes_of, first, self._workers):
            tasks = {
                shard: asyncio.ensure_future(self._push_in_turn(shard, facts, read, between, early))
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

    async def _push_in_turn(
        self,
        shard: int,
        facts: PushFacts,
        read: Read,
        between: asyncio.Lock | None,
        early: EarlyChunks | None,
    ) -> shard_pb2.Outcome:
        """Push to one shard; if a fault is planned between two shards, only after the push to the previous one."""
        if between is None:
            return await self._push_one(shard, facts, read, early)
        if early is not None:
            await early.whole()
        async with between:
            outcome = await self._push_one(shard, facts, read)
            if shard + 1 < len(self._targets):
                reach("worker.between_shards", facts.base_versions[shard])
            return outcome

    async def _push_one(
        self, shard: int, facts: PushFacts, read: Read, early: EarlyChunks | None = None
    ) -> shard_pb2.Outcome:
        targets, wanted = self._targets, self._wanted(shard, facts)
        begin, flow = early, self._flow_control.flow(facts.nonce)  # only the first attempt

        async def attempt(timeout_s: float) -> shard_pb2.PushResponse:
            nonlocal begin, flow
            now, begin = begin, None
            mine, flow = flow, None
            if early is not None and now is None:
                await early.whole()
            if facts.slot is not None:
                await self._near.attach_again(shard, timeout_s)
            channel = targets.channels[shard]
            attached = self._near.attached(shard) if facts.slot is not None else None
            header = self.push_header(shard, facts, len(wanted), attached)
            if now is not None and attached is None:
                coming = frames_as_ready(header, {chunk.index: chunk for chunk in wanted}, read, now)
                reply = await self._upload(shard, facts, channel, coming, mine, targets.wait_timeout_s)
            elif attached is None:
                frames = frames_of(header, facts, wanted, read, apart=mine is not None)
                reply = await self._upload(shard, facts, channel, frames, mine, timeout_s)
            else:
                try:
                    reply = await self._hand_over(shard, facts, attached, header, timeout_s)
                except errors.GoneError:
                    if self._near.attached(shard) is attached:
                        await self._near.lost(shard)
                    return await attempt(timeout_s)
            targets.still(shard, channel)
            return reply

        reply = await targets.persist(shard, f"to push {facts.name}", attempt, targets.nbytes[shard])
        outcome = shard_pb2.OUTCOME_ACCEPTED if reply.own else reply.outcome
        self._counted(shard, facts, read, outcome)
        return outcome

    async def _upload(
        self, shard: int, facts: PushFacts, channel: Channel, frames: Frames, flow: Flow | None, timeout_s: float
    ) -> shard_pb2.PushResponse:
        targets = self._targets
        traced = TracedPush(targets.trace, targets.names[shard], facts) if targets.trace.on else None
        if traced is not None:
            frames = traced.frames(frames)
        if flow is None:
            reply = await channel.upload("Shard.Push", frames, timeout=timeout_s)
        else:
            async with aclosing(flow.keep(shard, each(frames))) as leaving:
                reply = await channel.upload("Shard.Push", leaving, timeout=timeout_s)
        if traced is not None:
            traced.answered()
        return cast(shard_pb2.PushResponse, reply)

    async def _hand_over(
        self, shard: int, facts: PushFacts, attached: Attached, header: shard_pb2.PushHeader, timeout_s: float
    ) -> shard_pb2.PushResponse:
        """Push a contribution that the server reads in this worker's inbox."""
        traced = TracedPush(self._targets.trace, self._targets.names[shard], facts) if self._targets.trace.on else None
        request = shard_pb2.ExchangeRequest(push=header)
        if traced is not None:
            traced.left(0)
        reply = await attached.channel.call("Shard.Exchange", request, timeout=timeout_s)
        if traced is not None:
            traced.answered()
        return cast(shard_pb2.ExchangeResponse, reply).pushed

    # ---- contributions that are counted, and in no version yet

    def _counted(self, shard: int, facts: PushFacts, read: Read, outcome: shard_pb2.Outcome) -> None:
        """The present server of a shard has answered a push.

        Where names do not determine contributions, the script hears of a duplicate, and such a one must never count.
        """
        if isinstance(facts.name, SyncName) and (facts.by_data or outcome == shard_pb2.OUTCOME_ACCEPTED):
            self._unpublished.counted(facts.nonce, facts.name.step, shard, (facts, read))

    async def exchanged(self, facts: PushFacts, read: Read, channels: Sequence[Channel]) -> None:
        """The thread that trains has brought a contribution to the servers at the end of ``channels`` (by shard)."""
        for shard, channel in enumerate(channels):
            if self._targets.channels[shard] is channel:
                self._counted(shard, facts, read, shard_pb2.OUTCOME_ACCEPTED)
            else:
                self._targets.beside(self._push_again(shard, facts, read))

    def published(self, version: int) -> None:
        """All shards have published ``version``. From any thread."""
        self._unpublished.published(version)

    def moved(self, shard: int) -> None:
        """Another server has this shard: bring the contributions again that the former one had counted."""
        for facts, read in self._unpublished.moved(shard):
            self._targets.beside(self._push_again(shard, facts, read))

    async def _push_again(self, shard: int, facts: PushFacts, read: Read) -> None:
        try:
            outcome = await self._push_one(shard, facts, read)
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
            schedule=facts.schedule,
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
