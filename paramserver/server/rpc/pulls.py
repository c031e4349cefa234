"""How published versions go out: whole, chunk by chunk ahead of time, or in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from paramserver import errors
from paramserver.compress.base import Compressor
from paramserver.compress.registry import FOR_PULL, reader
from paramserver.core.events import PullAsked
from paramserver.server.ahead import Ahead
from paramserver.server.reporting import waiting_for
from paramserver.server.rpc.host import Host
from paramserver.server.running import RunningShard
from paramserver.server.version import Version
from paramserver.tensors.codec import encode_frame
from paramserver.transport.messages import consistency_to_proto, want_from_proto
from paramserver.v1 import shard_pb2

_MAX_WAIT_S = 3600.0


class Pulls(Host):
    """Weights for those who ask."""

    async def pull(self, request: shard_pb2.PullRequest) -> AsyncIterator[bytes]:
        """Answer with a whole published version as soon as the state machine says so, or `ready = false` in time."""
        self._check_job(request.job)
        want = want_from_proto(request)
        if not 0 <= request.wait_s <= _MAX_WAIT_S:
            raise errors.ProtocolError(f"wait_s must be between 0 and {_MAX_WAIT_S:g} seconds, not {request.wait_s:g}")
        rounding = reader(request.encoding, FOR_PULL)
        shard = self._ready(active=False)
        # Slots hold the weights as they are.
        attached = request.HasField("shared") and shard.sharing.asks(request.shared, request.worker) and not rounding

        def ask(call: int) -> PullAsked:
            return PullAsked(call, request.worker, want, request.timeline)

        ahead = Ahead(shard, ask, request.wait_s, rounding) if request.ahead and not attached else None
        if ahead is not None:
            async with aclosing(ahead.frames()) as drafts:
                async for frame in drafts:
                    self._pulled += len(frame)
                    yield frame
            pulled = ahead.pulled
        else:
            pulled = await shard.pull(ask, request.wait_s)
        state = shard.state
        if pulled is None:
            header = shard_pb2.PullHeader(
                version=state.version, timeline=state.timeline, waiting_for=waiting_for(shard)
            )
            yield encode_frame(shard_pb2.FrameHeader(pull=header), ())
            return
        version = shard.versions[pulled.version]
        bare = request.header_only or (
            request.HasField("have_version") and request.have_version == version.number and not request.include_frozen
        )
        frozen = request.include_frozen
        slot = await self._slot(shard, version) if attached and not bare else None
        if slot is not None and not shard.sharing.lend(request.shared.attachment, slot):
            slot = None
        header = shard_pb2.PullHeader(
            ready=True,
            version=version.number,
            timeline=state.timeline,
            consistency=consistency_to_proto(state.consistency),
            min_clock=pulled.min_clock,
            skipped=shard.tensors.skipped,
            chunks=0 if bare or slot is not None else len(version.moving(frozen)),
            schedule=shard.tensors.schedule,
            taken=shard.claims.taken(version.number),
            slot=slot,
            draft=0 if frozen else version.draft,
        )
        shard.claims.given(request, version.number)
        yield encode_frame(shard_pb2.FrameHeader(pull=header), ())
        if slot is not None:
            self._pulled += sum(chunk.nbytes for chunk in version.moving(frozen))
        if bare or slot is not None:
            return
        # Such as who gathers the result: nobody will ask again.
        if not request.worker and not version.encoded(frozen, rounding):
            async for frame in self._passing(version, frozen, rounding):
                self._pulled += len(frame)
                yield frame
            return
        frames = await self._frames(version, frozen, rounding)
        for frame in frames if ahead is None or frozen else ahead.rest(version, frames):
            self._pulled += len(frame)
            yield frame

    async def _passing(self, version: Version, frozen: bool, rounding: Compressor | None) -> AsyncIterator[bytes]:
        """The frames of a version, none of which is kept."""
        frames, loop = version.passing(frozen, rounding), asyncio.get_running_loop()
        while (frame := await loop.run_in_executor(self._encoder, next, frames, None)) is not None:
            yield frame

    async def _frames(self, version: Version, frozen: bool, rounding: Compressor | None) -> list[bytes]:
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
