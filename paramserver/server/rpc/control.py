"""Commands of the coordinator to a server that has its part of the model: members, consistency, checkpoints."""

from __future__ import annotations

import structlog

from paramserver import errors
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.events import (
    ConsistencyAborted,
    ConsistencyCommitted,
    ConsistencyPrepared,
    CutEnded,
    MembersChanged,
    PlanSettled,
    StandsAt,
)
from paramserver.server.rpc.filling import fill
from paramserver.server.rpc.host import Host
from paramserver.server.versions import cutting
from paramserver.v1 import shard_pb2
from paramserver.wire.bounds import seconds
from paramserver.wire.messages import consistency_from_proto, slices_from_proto, slices_to_proto

log = structlog.get_logger("paramserver.server")

# No longer than this does a checkpoint hold workers back.
_HELD_S = 30.0


class Control:
    """Commands of the coordinator; a command of one that has been replaced is refused."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def set_members(self, request: shard_pb2.SetMembersRequest) -> shard_pb2.SetMembersResponse:
        """Learn the workers of this generation. Older news changes nothing."""
        self._host.process.check_authority(request)
        self._host.process.keep(request.record)
        await self._host.process.settle(request.plan, request.settled)
        shard = self._host.ready(active=False, primary=False)
        shard.happen(PlanSettled(request.settled))
        shard.copies.backups.settled(request.settled)
        shard.names.update((w.member, w.name) for w in request.workers)
        workers = frozenset(w.member for w in request.workers)
        if request.generation >= shard.state.generation:
            shard.sharing.keep(workers)
            shard.stealing.keep(workers)
        shard.happen(MembersChanged(request.generation, workers))
        return shard_pb2.SetMembersResponse()

    async def set_consistency(self, request: shard_pb2.SetConsistencyRequest) -> shard_pb2.SetConsistencyResponse:
        """Prepare, commit or abort another mode or staleness. Saying it twice changes nothing."""
        self._host.process.check_authority(request)
        shard = self._host.ready()
        wanted = consistency_from_proto(request.consistency)
        match request.phase:
            case shard_pb2.PHASE_PREPARE:
                shard.happen(ConsistencyPrepared(wanted))
            case shard_pb2.PHASE_COMMIT:
                shard.happen(ConsistencyCommitted(wanted.revision, wanted))
                log.debug("consistency changes", to=str(wanted), from_version=wanted.from_version)
            case shard_pb2.PHASE_ABORT:
                shard.happen(ConsistencyAborted(wanted.revision))
            case _:
                raise errors.ProtocolError(f"unknown phase number {request.phase}")
        present = shard.state.changeover.scheduled or shard.state.consistency
        return shard_pb2.SetConsistencyResponse(
            scheduled=present.revision == wanted.revision, version=shard.state.version
        )

    async def cut(self, request: shard_pb2.CutRequest) -> shard_pb2.CutResponse:
        """Hold workers back, copy a version for a checkpoint, let them go on, fill the last step, cut for readers."""
        self._host.process.check_authority(request)
        shard = self._host.on(request.timeline)
        shard.holding.commanded()
        taken, waiting_for = False, ""
        match request.step:
            case shard_pb2.CutRequest.STEP_HOLD:
                shard.holding.begin(_HELD_S)  # should the coordinator be lost before it lets them go
            case shard_pb2.CutRequest.STEP_LET_GO:
                shard.holding.end()
            case shard_pb2.CutRequest.STEP_COPY:
                if shard.saver is None:
                    raise errors.ProtocolError("there is no place for checkpoints")
                if shard.can_cut(request.version):
                    # A synchronous job makes no other version soon: this is its last one.
                    taken = shard.copy(shard.versions[request.version], shard.state.consistency.mode is Mode.ASYNC)
                elif _will_make(shard.state, request.version):
                    shard.saver.copy_ahead(request.version)
                    taken = True
            case shard_pb2.CutRequest.STEP_FILL:
                missing = [(gap.start, gap.stop) for gap in request.missing]
                taken = await fill(shard, request.version, missing, request.of)
            case shard_pb2.CutRequest.STEP_PAUSE:
                await cutting.pause(shard, request.number)
                counted = slices_to_proto(shard.state.counted())
                return shard_pb2.CutResponse(version=shard.state.version, counted=counted)
            case shard_pb2.CutRequest.STEP_REACH:
                wait_s = seconds("wait_s", request.wait_s, _HELD_S)
                waiting_for = await cutting.reach(shard, request.number, slices_from_proto(request.slices), wait_s)
                if not waiting_for:
                    assert shard.state.cut.kept is not None
                    return shard_pb2.CutResponse(taken=True, version=shard.state.cut.kept)
            case shard_pb2.CutRequest.STEP_STAND:
                shard.happen(StandsAt(request.number, request.version))
                taken = shard.state.published.stands(request.number, request.version)
            case shard_pb2.CutRequest.STEP_GO_ON:
                shard.happen(CutEnded(request.number))
            case _:
                raise errors.ProtocolError(f"unknown step number {request.step}")
        return shard_pb2.CutResponse(taken=taken, version=shard.state.version, waiting_for=waiting_for)

    async def release(self, request: shard_pb2.ReleaseRequest) -> shard_pb2.ReleaseResponse:
        """Copies of these versions are needed no more."""
        self._host.process.check_authority(request)
        shard = self._host.on(request.timeline)
        if shard.saver is not None:
            shard.saver.release(request.versions)
        return shard_pb2.ReleaseResponse()


def _will_make(state: ShardState, version: int) -> bool:
    """Whether a synchronous shard has still to publish ``version``."""
    return state.active and state.consistency.mode is Mode.SYNC and state.version < version
