"""Calls that read other facts than weights: counters, accounts, optimizer state, copies, norms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial

from paramserver import errors
from paramserver.checkpoint import probe
from paramserver.checkpoint.place import Place
from paramserver.frames import AnyFrame
from paramserver.server.arithmetic.state import StateEntry
from paramserver.server.replicas.parcels import state_pieces
from paramserver.server.reporting import ledger_response, report
from paramserver.server.rpc.contributions import Contributions
from paramserver.server.rpc.host import Host
from paramserver.server.rpc.pulls import Pulls
from paramserver.server.running import RunningShard
from paramserver.tensors.codec import frame_of
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import slices_to_proto

_EXPORT_BYTES = 4 << 20
MAX_WAIT_S = 3600.0


class Facts:
    """For status pages, for the process that gathers the result, and for other shards."""

    def __init__(self, host: Host, contributions: Contributions, pulls: Pulls) -> None:
        self._host, self._contributions, self._pulls = host, contributions, pulls

    def report(self) -> shard_pb2.StatsResponse:
        """Counters and the present state."""
        response = report(self._host.shard)
        process = self._host.process
        response.term, response.incarnation = process.term, process.incarnation
        response.refused += self._contributions.refused
        response.bytes_pushed, response.bytes_pulled = self._contributions.pushed, self._pulls.pulled
        return response

    def news(self) -> shard_pb2.StatsResponse:
        """The same with the times of versions, which are told once."""
        response = self.report()
        shard = self._host.shard
        if shard is not None and not shard.state.backup:
            synchronous = shard.state.active and shard.state.missing() is not None
            shard.times.write(response, shard.buffers if synchronous else {}, self._host.process.pulse)
        return response

    async def stats(self, request: shard_pb2.StatsRequest) -> shard_pb2.StatsResponse:
        """Counters and the present state, for status pages."""
        self._host.process.check_job(request.job)
        response = self.report()
        if request.record:
            response.record = self._host.process.record.SerializeToString()
            if self._host.shard is not None:
                response.model.CopyFrom(self._host.shard.config.model)
        return response

    async def probe_place(self, request: shard_pb2.ProbePlaceRequest) -> shard_pb2.ProbePlaceResponse:
        """Answer a question that the coordinator has left in the place of the checkpoints. Raises CheckpointError."""
        self._host.process.check_job(request.job)
        await asyncio.to_thread(lambda: probe.answer(Place(request.place), request.question, request.answer))
        return shard_pb2.ProbePlaceResponse()

    async def counted(self, request: shard_pb2.CountedRequest) -> shard_pb2.CountedResponse:
        """The asynchronous slices that are in published versions."""
        self._host.process.check_job(request.job)
        return shard_pb2.CountedResponse(epochs=slices_to_proto(self._host.ready().state.counted()))

    async def ledger(self, request: shard_pb2.LedgerRequest) -> shard_pb2.LedgerResponse:
        """The contributions that were counted, and the workers that brought them."""
        self._host.process.check_job(request.job)
        shard = self._host.ready()
        return ledger_response(shard)

    async def export(self, request: shard_pb2.ExportRequest) -> AsyncIterator[AnyFrame]:
        """The optimizer state of one version, tensor by tensor, in pieces; or all of some chunks, for another plan."""
        self._host.process.check_job(request.job)
        if not 0 <= request.wait_s <= MAX_WAIT_S:
            raise errors.ProtocolError(f"wait_s must be between 0 and {MAX_WAIT_S:g} seconds, not {request.wait_s:g}")
        shard = self._host.on(request.timeline)
        if request.chunks or request.facts:
            for frame in await _handed_over(shard, request):
                yield frame
            return
        tensors = shard.tensors
        # The state between two steps. A step that comes meanwhile first copies the chunks that it changes.
        found = await shard.state_from(request.min_version, request.wait_s)
        header = shard_pb2.PullHeader(timeline=request.timeline)
        if found is None:
            yield frame_of(shard_pb2.FrameHeader(pull=header), ())
            return
        header.ready, header.version = True, found[0]
        copy = found[1]
        try:
            yield frame_of(shard_pb2.FrameHeader(pull=header), ())
            for index in sorted(tensors.states):
                for entry in await shard.arithmetic(partial(copy.use, index)):
                    for frame in _state_frames(entry):
                        yield frame
        finally:
            tensors.drop_copy(copy)

    async def share_norms(self, request: shard_pb2.ShareNormsRequest) -> shard_pb2.ShareNormsResponse:
        """Another shard tells the norm of its part of a step's gradient."""
        self._host.process.check_job(request.job)
        shard = self._host.ready()
        if request.timeline != shard.state.timeline:
            raise errors.FencedError(f"norms of timeline {request.timeline}, this shard is on {shard.state.timeline}")
        await shard.norms.hear(request, shard.state.version)
        return shard_pb2.ShareNormsResponse()

    async def copied(self, request: shard_pb2.CopiedRequest) -> AsyncIterator[AnyFrame]:
        """Chunks of a copy, for a server that writes a tensor of which they are a part."""
        self._host.process.check_job(request.job)
        shard = self._host.on(request.timeline)
        if shard.saver is None:
            raise errors.ProtocolError("there is no place for checkpoints")
        for frame in await shard.saver.copied(request.version, list(request.chunks)):
            yield frame


async def _handed_over(shard: RunningShard, request: shard_pb2.ExportRequest) -> Iterator[AnyFrame]:
    """Frames with weights and state of some chunks of a shard at rest, for a shard of a new plan."""
    if not shard.can_cut(request.min_version):
        raise errors.UnavailableError(f"this shard does not stand at version {request.min_version}")
    if len({*request.chunks}) != len(request.chunks) or not {*request.chunks} <= shard.chunks.keys():
        raise errors.ProtocolError("a chunk was asked for twice, or does not lie on this server")
    chunks = [shard.chunks[index] for index in request.chunks]
    return await shard.copies.catch_up(chunks, request.facts).frames()


def _state_frames(entry: StateEntry) -> Iterator[AnyFrame]:
    """Optimizer state in pieces."""
    for ref, part in state_pieces(entry, _EXPORT_BYTES):
        yield frame_of(shard_pb2.FrameHeader(states=[ref]), [part])
