"""Calls of workers that bring contributions, report that they are idle, or ask for work."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor

from paramserver import errors
from paramserver.core.layout.plan import Chunk
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.advances import decode
from paramserver.core.versions.events import Outcome, WentIdle
from paramserver.core.versions.names import SyncName
from paramserver.failpoints import reach
from paramserver.frames import AnyFrame
from paramserver.server.arithmetic.hypers import differing
from paramserver.server.rpc.host import Host
from paramserver.server.running import RunningShard
from paramserver.server.versions import stealing
from paramserver.server.versions.intake import Intake
from paramserver.server.versions.receive import first_non_finite, receive
from paramserver.server.versions.shard import Contribution
from paramserver.v1 import shard_pb2
from paramserver.wire.bounds import MAX_SAMPLES, counting
from paramserver.wire.messages import name_from_proto, unpack_mask

_OUTCOMES = {
    Outcome.ACCEPTED: shard_pb2.OUTCOME_ACCEPTED,
    Outcome.DUPLICATE: shard_pb2.OUTCOME_DUPLICATE,
}


def _bad(shard: RunningShard, contribution: Contribution) -> str | None:
    """The name of the first tensor with a number that is not finite. Reads only what no draft has summed already."""
    known = shard.drafting.finite(contribution)
    unknown = {index: values for index, values in contribution.chunks.items() if index not in known}
    return first_non_finite(shard.tensors.layout, unknown)


class Contributions:
    """Contributions, and work stealing."""

    def __init__(self, host: Host) -> None:
        self.intake = Intake()
        # When a worker was last heard of (monotonic seconds).
        self.used_at = time.monotonic()
        # Bytes that were taken in, and contributions that were refused.
        self.pushed = self.refused = 0
        self._host = host

    async def idle(self, request: shard_pb2.IdleRequest) -> shard_pb2.IdleResponse:
        """The worker has nothing to do and holds nobody back until it pulls again."""
        self._host.process.check_job(request.job)
        self._host.ready().happen(WentIdle(request.worker))
        return shard_pb2.IdleResponse()

    async def steal(self, request: shard_pb2.StealRequest) -> shard_pb2.StealResponse:
        """A slice of the open step for a worker that has time, if computing one is useful."""
        self._host.process.check_job(request.job)
        shard = self._host.ready()
        return stealing.answer(shard.stealing, request, shard.state)

    async def push(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
        """Count a contribution, once. Refused ones change nothing."""
        self.used_at = time.monotonic()
        shard, trace = self._host.ready(), self._host.process.trace
        began = trace.now() if trace.on else 0
        chunks: dict[int, Tensor] = {}
        coming: Contribution | None = None
        ack: Callable[[], None] | None = None

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            nonlocal coming, ack
            used = self._begin(header.push, shard)
            if header.push.HasField("shared"):
                raise errors.ProtocolError("gradients that lie in shared memory come with Shard.Exchange")
            receiving.enter_context(self.intake.receiving(shard.queued, shard.nbytes))
            needed = shard.tensors.chunks_used(used)
            coming = contribution_of(header.push, chunks, shard, used, checked=True)
            shard.drafts(coming, header.push, needed)
            ack = receiving.enter_context(shard.acks.counting(header.push.worker, header.push.nonce))
            return needed, header.push.chunks

        def came(chunk: int) -> None:
            if ack is not None:
                ack()
            if coming is not None:
                shard.drafting.came(coming, chunk)

        try:
            with self._checking(), ExitStack() as receiving:
                upload = await receive(
                    frames, "push", expect, chunks=chunks, came=came, decode=self._host.process.arithmetic
                )
                contribution = coming
                assert contribution is not None, "the first header has been looked at"
                bad = await shard.arithmetic(partial(_bad, shard, contribution))
                if bad is not None:
                    raise errors.NonFiniteError(
                        f"{contribution.name} of worker {contribution.worker}: the gradient of {bad!r} is not finite"
                    )
        except BaseException:
            if coming is not None:
                shard.drafting.fails(coming)
            raise
        if began:
            shard.trace.received(contribution, began, upload.payload_bytes)
        return await self.count(shard, contribution, upload.header.push, upload.payload_bytes)

    def lying(self, header: shard_pb2.PushHeader) -> tuple[RunningShard, Contribution]:
        """The contribution that lies in shared memory, and the shard it is for. Raises ProtocolError."""
        self.used_at = time.monotonic()
        shard = self._host.ready()
        with self._checking():
            used = self._begin(header, shard)
            if not (header.HasField("shared") and header.shared.checked):
                raise errors.ProtocolError("gradients that do not lie in shared memory, or are not checked, are pushed")
            with self.intake.receiving(shard.queued, shard.nbytes):
                needed = shard.tensors.chunks_used(used)
                lying = shard.sharing.contribution(header.shared, header.worker, needed)
                # It is checked when it is summed, so that it is read once.
                return shard, contribution_of(header, lying, shard, used, checked=False)

    async def take(
        self, shard: RunningShard, contribution: Contribution, header: shard_pb2.PushHeader
    ) -> shard_pb2.PushResponse:
        """Count a contribution that lies in shared memory, once."""
        shard.drafts(contribution, header)  # all of it is there, while contributions of other hosts may still arrive
        nbytes = sum(tensor.nbytes for tensor in contribution.chunks.values())
        return await self.count(shard, contribution, header, nbytes)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Context in which a contribution is checked; a ProtocolError refuses it."""
        try:
            yield
        except errors.ProtocolError:
            self.refused += 1
            raise

    async def count(
        self, shard: RunningShard, contribution: Contribution, header: shard_pb2.PushHeader, nbytes: int
    ) -> shard_pb2.PushResponse:
        """Count a contribution of ``nbytes`` bytes that has passed all other checks. Raises ModelError."""
        _check_agreement(contribution, shard.buffers.values())
        self.pushed += nbytes
        pushed, own = await shard.push(contribution, header)
        reach("reply.drop", contribution.base_version)
        return shard_pb2.PushResponse(outcome=_OUTCOMES[pushed.outcome], version=pushed.version, own=own)

    def _begin(self, header: shard_pb2.PushHeader, shard: RunningShard) -> frozenset[int]:
        """A push begins: check its header. Returns the tensors that it has gradients for."""
        reach("push.recv", header.base_version)
        self._host.process.check_job(header.job)
        counting("samples", header.samples, MAX_SAMPLES)
        counting("clock", header.clock)
        used = unpack_mask(header.used, len(shard.tensors.layout.tensors))
        decode(header.advances)
        if not 0 <= header.clip_norm < math.inf:
            raise errors.ProtocolError(f"clip_norm must be finite and not negative, not {header.clip_norm}")
        if header.overflow and used:
            raise errors.ProtocolError("a contribution with the overflow flag must not carry gradients")
        if used and not header.samples:
            raise errors.ProtocolError("a contribution of no samples must not carry gradients")
        _check_base(header, shard.state)
        return used


def _check_base(header: shard_pb2.PushHeader, state: ShardState) -> None:
    """A gradient must come from the weights of its step, or (asynchronous) from some that were published."""
    name, base = name_from_proto(header), header.base_version
    if isinstance(name, SyncName):
        if base != name.step:
            raise errors.ProtocolError(f"{name} was computed on version {base}, not on the weights of its step")
    elif header.timeline == state.timeline and base > state.version:
        raise errors.ProtocolError(f"{name} was computed on version {base}, which this shard has not published")


def _check_agreement(contribution: Contribution, others: Iterable[Contribution]) -> None:
    """A step has one update, and so the hyper-parameters of its slices are the same. Raises ModelError.

    Those of a worker that has just joined and does not know its schedulers yet do not count: see `leading`.
    """
    name = contribution.name
    if not (isinstance(name, SyncName) and contribution.samples and contribution.advances):
        return
    for other in others:
        same_step = isinstance(other.name, SyncName) and other.name.step == name.step
        if not (same_step and other.samples and other.advances):
            continue
        if difference := differing(other.groups, contribution.groups):
            raise errors.ModelError(
                f"the hyper-parameters of two workers differ in step {name.step}: {difference}. Give the scheduler to "
                "ctx.prepare, or compute the hyper-parameters from ctx.version, which is the number of the step"
            )


def contribution_of(
    header: shard_pb2.PushHeader, chunks: Mapping[int, Tensor], shard: RunningShard, used: frozenset[int], checked: bool
) -> Contribution:
    """The contribution of a push whose header has passed all checks. Raises ProtocolError for hyper-parameters."""
    return Contribution(
        name=name_from_proto(header),
        worker=header.worker,
        samples=header.samples,
        overflow=header.overflow,
        base_version=header.base_version,
        used=used,
        groups=shard.hypers.of(header.groups),
        chunks=chunks,
        advances=header.advances,
        clip_norm=header.clip_norm,
        nonce=header.nonce,
        checked=checked,
    )
