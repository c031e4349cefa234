"""How published versions go out: whole, chunk by chunk ahead of time, or in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from paramserver import errors
from paramserver.compress.base import Compressor
from paramserver.compress.registry import FOR_PULL, reader
from paramserver.core.versions.events import AnswerPull, PullAsked
from paramserver.frames import AnyFrame, Frame
from paramserver.server.reporting import waiting_for
from paramserver.server.rpc.contributions import Contributions
from paramserver.server.rpc.host import Host
from paramserver.server.running import RunningShard
from paramserver.server.versions import stealing
from paramserver.server.versions.ahead import Ahead
from paramserver.server.versions.version import Version
from paramserver.tensors.codec import frame_of
from paramserver.v1 import shard_pb2
from paramserver.wire.bounds import seconds
from paramserver.wire.messages import consistency_to_proto, pack_mask, want_from_proto

_MAX_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Pulling:
    """A pull that has passed all checks. ``ask``: makes the question to the shard out of the number of the call.

    ``shares``: the worker reads weights where they are.
    """

    shard: RunningShard
    ask: Callable[[int], PullAsked]
    rounding: Compressor | None
    shares: bool = False


class Pulls:
    """Weights for workers, and for processes that gather the result."""

    def __init__(self, host: Host, contributions: Contributions) -> None:
        # Bytes of weights that were given out.
        self.pulled = 0
        self._host, self._contributions = host, contributions
        # A pull does not wait for the version that is being made.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._encoding = asyncio.Lock()

    def close(self) -> None:
        """End the thread."""
        self._encoder.shutdown(wait=True)

    async def pull(self, request: shard_pb2.PullRequest) -> AsyncIterator[AnyFrame]:
        """Answer with a whole published version as soon as the state machine says so, or `ready = false` in time."""
        pulling = self._checked(request)
        shard, rounding = pulling.shard, pulling.rounding
        ahead = None
        if request.ahead:
            worker = request.worker if request.acks else None
            ahead = Ahead(shard, pulling.ask, request.wait_s, rounding, worker, request.header_only)
            async with aclosing(ahead.frames()) as drafts:
                async for frame in drafts:
                    self.pulled += len(frame)
                    yield frame
            pulled = ahead.pulled
        else:
            pulled = await shard.pull(pulling.ask, request.wait_s)
        header, version = await self._header(pulling, request, pulled)
        yield frame_of(shard_pb2.FrameHeader(pull=header))
        if version is None:
            return
        frozen = request.include_frozen
        # A process that gathers the result: nobody will ask for these frames again.
        if not request.worker and not version.encoded(frozen, rounding):
            async for frame in self._passing(version, frozen, rounding):
                self.pulled += len(frame)
                yield frame
            return
        trace, before = self._host.process.trace, self.pulled
        began = trace.now() if trace.on else 0
        frames = await self._frames(version, frozen, rounding)
        for frame in frames if ahead is None or frozen else ahead.rest(version, frames):
            self.pulled += len(frame)
            yield frame
        if began:
            shard.trace.sent(request.worker, began, version.number, self.pulled - before)

    async def exchange(self, request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
        """A push, a pull, or first the one and then the other, of a worker that shares memory.

        Count a contribution, once. Answer with the header of a version as a pull does.
        """
        lying = self._contributions.lying(request.push) if request.HasField("push") else None
        pulling = self._checked(request.pull, shares=True) if request.HasField("pull") else None
        if lying is None and pulling is None:
            raise errors.ProtocolError("an exchange has a push or a pull")
        pushed = await self._contributions.take(*lying, request.push) if lying is not None else None
        if pulling is None:
            return shard_pb2.ExchangeResponse(pushed=pushed)
        pulled = await pulling.shard.pull(pulling.ask, request.pull.wait_s)
        header, _ = await self._header(pulling, request.pull, pulled)
        return shard_pb2.ExchangeResponse(pushed=pushed, pulled=header)

    def _checked(self, request: shard_pb2.PullRequest, shares: bool = False) -> Pulling:
        """Check a pull."""
        self._host.process.check_job(request.job)
        want = want_from_proto(request)
        seconds("wait_s", request.wait_s, _MAX_WAIT_S)
        rounding = reader(request.encoding, FOR_PULL)
        shard = self._host.ready(active=False)
        if shares:  # slots hold the weights as they are
            known = request.HasField("shared") and shard.sharing.asks(request.shared, request.worker)
            shares = known and rounding is None
        return Pulling(shard, lambda call: PullAsked(call, request.worker, want, request.timeline), rounding, shares)

    async def _header(
        self, pulling: Pulling, request: shard_pb2.PullRequest, pulled: AnswerPull | None
    ) -> tuple[shard_pb2.PullHeader, Version | None]:
        """The header of an answer, and the version whose chunks follow; None if no chunks follow."""
        shard = pulling.shard
        state = shard.state
        if pulled is None:
            waiting = waiting_for(shard)
            return shard_pb2.PullHeader(version=state.version, timeline=state.timeline, waiting_for=waiting), None
        version = shard.versions[pulled.version]
        frozen = request.include_frozen
        bare = request.header_only
        slot = await self._slot(shard, version) if pulling.shares and not bare else None
        if slot is not None and not shard.sharing.lend(request.shared.attachment, slot):
            slot = None
        if slot is not None:
            self.pulled += sum(chunk.nbytes for chunk in version.moving(frozen))
        follow = not bare and slot is None
        header = shard_pb2.PullHeader(
            ready=True,
            version=version.number,
            timeline=state.timeline,
            consistency=consistency_to_proto(state.consistency),
            min_clock=pulled.min_clock,
            skipped=shard.tensors.skipped,
            chunks=len(version.moving(frozen)) if follow else 0,
            advances=shard.tensors.advances,
            ever_used=pack_mask(version.ever_used, len(shard.tensors.layout.tensors)),
            taken=shard.stealing.taken(version.number),
            slot=slot,
            draft=0 if frozen else version.draft,
            counted=state.marks.of(version.number),
            copied=shard.saver is not None and shard.saver.copies(version.number),
        )
        stealing.note(shard.stealing, request, version.number)
        return header, version if follow else None

    async def _passing(self, version: Version, frozen: bool, rounding: Compressor | None) -> AsyncIterator[AnyFrame]:
        """The frames of a version, none of which is kept."""
        frames, loop = version.passing(frozen, rounding), asyncio.get_running_loop()
        while (frame := await loop.run_in_executor(self._encoder, next, frames, None)) is not None:
            yield frame

    async def _frames(self, version: Version, frozen: bool, rounding: Compressor | None) -> list[Frame]:
        if not version.encoded(frozen, rounding):
            async with self._encoding:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._encoder, lambda: version.frames(frozen, rounding))
        return version.frames(frozen, rounding)

    async def _slot(self, shard: RunningShard, version: Version) -> int | None:
        """Where the version lies in shared memory; it moves there if it must. None: there is no room."""
        sharing = shard.sharing
        if not sharing.lies(version):
            async with self._encoding:
                if not sharing.lies(version):
                    slot = sharing.take() if version.slot is None else None
                    if slot is None and version.slot is None:
                        return None
                    loop = asyncio.get_running_loop()
                    done = await loop.run_in_executor(self._encoder, lambda: sharing.share(version, slot))
                    sharing.shared(version, slot, done)
                    if not done:
                        return None
        return version.slot
