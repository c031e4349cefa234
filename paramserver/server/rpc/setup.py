"""How a server gets its part of a model: from a worker, or from a checkpoint; and how that is published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import structlog
import torch

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint import manifest as manifests
from paramserver.checkpoint.place import Place
from paramserver.core.layout.hypers import rule_of
from paramserver.core.layout.plan import Chunk, Kind, Plan
from paramserver.core.shards.shard import ShardState
from paramserver.failpoints import reach
from paramserver.frames import AnyFrame
from paramserver.server.arithmetic.norms import NormExchange
from paramserver.server.arithmetic.state import State
from paramserver.server.replicas.filling import fill
from paramserver.server.replicas.parts import Parts
from paramserver.server.rpc.host import Host
from paramserver.server.running import RunningShard, Staged
from paramserver.server.saving.brought import BroughtState
from paramserver.server.saving.restoring import restore
from paramserver.server.saving.saver import Saver, place_of
from paramserver.server.versions.receive import first_non_finite, receive
from paramserver.server.versions.shard import ShardTensors
from paramserver.server.versions.version import Version, room_for
from paramserver.tensors.hypers import groups_from_proto, optimizers_of
from paramserver.tensors.optimizers import torch_class
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import consistency_from_proto, plan_of

log = structlog.get_logger("paramserver.server")


class Setup:
    """From nothing to a published version."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._replacing = asyncio.Lock()

    async def configure(self, request: shard_pb2.ConfigureRequest) -> shard_pb2.ConfigureResponse:
        """Learn the model and this server's part of the plan. A repeated command changes nothing."""
        self._host.process.check_authority(request)
        self._host.process.check_meant(request)
        self._host.process.keep(request.record)
        async with self._replacing:
            shard = self._host.shard
            if request.HasField("filling"):
                return await self._fill(request)
            self._host.process.in_force(self._host.plan)
            if request.keep:
                return await self._configure_to_load(request)
            if shard is not None and not request.anew:
                if shard.config.generation > request.generation:
                    raise errors.FencedError(
                        f"configuration of generation {request.generation} is older than the present one"
                    )
                if shard.digest != (await self._plan(request)).layout.digest:
                    raise errors.ProtocolError("this shard already holds another model")
                return shard_pb2.ConfigureResponse(layout_digest=shard.digest)
            made = self._make(request, await self._plan(request))
            await self._host.replace(made)
        log.debug("configured", chunks=len(made.chunks), bytes=sum(c.nbytes for c in made.chunks.values()))
        return shard_pb2.ConfigureResponse(layout_digest=made.digest)

    async def _configure_to_load(self, request: shard_pb2.ConfigureRequest) -> shard_pb2.ConfigureResponse:
        """Begin another timeline where this shard stands; a worker uploads what the scripts load."""
        shard = self._host.ready(active=False)
        if shard.config.timeline > request.timeline:
            raise errors.FencedError(f"this server is on timeline {shard.config.timeline} already")
        if shard.config.timeline == request.timeline and shard.kept is not None:  # said twice
            return shard_pb2.ConfigureResponse(layout_digest=shard.digest)
        if shard.digest != request.layout_digest or not shard.can_cut(request.version):
            raise errors.ProtocolError(f"this shard does not stand at version {request.version} of that model")
        kept = await self._host.process.arithmetic(shard.keep)
        if not shard.can_cut(request.version):
            raise errors.ProtocolError(f"this shard has gone on from version {request.version}")
        made = self._make(request, await self._plan(request))
        made.begin_with(kept.facts)
        made.kept = kept
        await self._host.replace(made)
        return shard_pb2.ConfigureResponse(layout_digest=made.digest)

    async def _fill(self, request: shard_pb2.ConfigureRequest) -> shard_pb2.ConfigureResponse:
        """Begin where the shards of the former plan stand, with their chunks. A repeated command changes nothing."""
        shard = self._host.shard
        if shard is not None:
            if shard.config.timeline != request.timeline:
                raise errors.FencedError(f"this server is on timeline {shard.config.timeline} already")
            return shard_pb2.ConfigureResponse(layout_digest=shard.digest)
        filling, process = request.filling, self._host.process
        parts = self._host.parts if _fits(self._host.parts, filling) else None
        if filling.ahead and parts is not None:
            return shard_pb2.ConfigureResponse(layout_digest=parts.digest, whole=parts.whole)
        former = await process.arithmetic(lambda: plan_of(request.model, len(filling.sources)))
        plan = await self._plan(request)
        if filling.ahead:
            if self._host.left:
                raise errors.UnavailableError("the change of the number of servers was given up meanwhile")
            parts = Parts(process.job, plan, self._host.plan, request, former, process.team, process.connect)
            self._host.brings(parts)
            return shard_pb2.ConfigureResponse(layout_digest=parts.digest)
        made = self._make(request, plan)
        try:
            await fill(made, filling, former, process, parts)
            if self._host.left:
                raise errors.UnavailableError("the change of the number of servers was given up meanwhile")
        except BaseException:
            await made.close()
            raise
        await self._host.replace(made)
        return shard_pb2.ConfigureResponse(layout_digest=made.digest)

    async def _plan(self, request: shard_pb2.ConfigureRequest) -> Plan:
        """The plan of a model; made in the thread, since it takes a while for a hundred thousand tensors."""
        return await self._host.process.arithmetic(lambda: plan_of(request.model, request.shards))

    def _make(self, request: shard_pb2.ConfigureRequest, plan: Plan) -> RunningShard:
        """A shard as configured, with nothing in it. Raises ProtocolError, ModelError."""
        if request.shard >= request.shards:
            raise errors.ProtocolError(f"shard {request.shard} of {request.shards} does not exist")
        if request.layout_digest and request.layout_digest != plan.layout.digest:
            raise errors.ProtocolError(
                "the coordinator lays this model out differently: run one version of paramserver"
            )
        spec = request.model.optimizer
        groups = groups_from_proto(spec.groups)
        optimizers = optimizers_of(spec)
        optimizers.validate(groups)
        for name in set(optimizers.names):
            if rule_of(name).own:
                torch_class(name)  # refused before anything is made, if this server does not run it
        state = ShardState(
            consistency_from_proto(request.consistency),
            [w.member for w in request.workers],
            request.generation,
            request.backup,
        )
        state.timeline = request.timeline
        process = self._host.process
        exchange = NormExchange(process.connect, process.job, process.wait_timeout_s)
        exchange.configure(request.shard, request.peers)
        place = place_of(request)
        saver = Saver(place, plan, request, process.connect, lambda: process.news()) if place is not None else None
        tensors = ShardTensors(plan.layout, plan.chunks_of(request.shard), optimizers, process.team)
        return RunningShard(
            request,
            plan,
            groups,
            state,
            tensors,
            exchange,
            process.pool,
            saver,
            process.fail,
            process.connect,
            lambda: process.news(),
            process.shares,
            process.trace,
        )

    async def restore(self, request: shard_pb2.RestoreRequest) -> shard_pb2.RestoreResponse:
        """Take a checkpoint in, on a new timeline; :meth:`activate` publishes it. May be repeated.

        Raises CheckpointError if the files are damaged or do not fit.
        """
        self._host.process.check_authority(request.configure)
        self._host.process.check_meant(request.configure)
        self._host.process.keep(request.configure.record)
        async with self._replacing:
            self._host.process.in_force(self._host.plan)
            timeline = request.configure.timeline
            former = self._host.shard
            if former is not None and timeline < former.config.timeline:
                raise errors.FencedError(f"this server is on timeline {former.config.timeline} already")
            if former is not None:  # nothing of the old timeline counts any more
                former.end(errors.RolledBackError(f"the job goes back to a checkpoint, on timeline {timeline}"))
            made = self._make(request.configure, await self._plan(request.configure))
            place = Place(request.place) if request.place else place_of(request.configure)
            if place is None:
                raise errors.ProtocolError("there is no place with checkpoints to restore from")
            reach("restore.before_load")
            manifest = manifests.decode(request.manifest.encode())
            if not await asyncio.to_thread(catalog.exists, place, manifest.name):
                raise errors.UnavailableError(
                    f"a server does not see {manifest.name} in {place}: put it back, or mount the volume there"
                )
            optimizer = request.configure.model.optimizer
            version, facts = await self._host.process.arithmetic(
                lambda: restore(place, manifest, made.plan.layout, optimizer, made.tensors)
            )
            reach("restore.after_load")
            made.begin_with(facts)
            made.staged, made.restored = Staged(request.grant, version), True
            await self._host.replace(made)
        return shard_pb2.RestoreResponse(version=manifest.version, layout_digest=made.digest)

    async def initialize(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.InitializeResponse:
        """Stage version 0, and the optimizer state that comes with it.

        It is published by :meth:`activate` only, so that no two uploads can mix.
        """
        shard = self._host.ready(active=False)
        brought = BroughtState(shard.tensors)

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            self._host.process.check_job(header.initialize.job)
            if header.initialize.timeline != shard.config.timeline:
                raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}")
            if (header.initialize.keep_weights or header.initialize.keep_states) and shard.kept is None:
                raise errors.ProtocolError("this shard has nothing to keep")
            return {} if header.initialize.keep_weights else shard.chunks, header.initialize.chunks

        # Chunks are copied as they come, so that the messages need not be kept.
        room = room_for(shard.chunks.values())
        upload = await receive(
            frames, "initialize", expect, lambda chunk, values: room[chunk.index].copy_(values), state=brought.take
        )
        grant = upload.header.initialize.grant
        if shard.state.active or (shard.staged is not None and shard.staged.grant > grant):
            raise errors.FencedError("version 0 has been uploaded by somebody else")
        if shard.restored:
            raise errors.FencedError("this shard goes on from a checkpoint")
        # Buffers and frozen tensors may well hold an infinity, as masks do.
        trained = {i: t for i, t in upload.chunks.items() if shard.chunks[i].kind is Kind.PARAMETER}
        bad = await self._host.process.arithmetic(lambda: first_non_finite(shard.tensors.layout, trained))
        if bad is not None:
            raise errors.NonFiniteError(f"the initial value of {bad!r} is not finite")
        header, kept = upload.header.initialize, shard.kept
        states: Mapping[int, State] = await self._host.process.arithmetic(
            lambda: brought.load(header.states, shard.hypers.first)
        )
        chunks: Mapping[int, torch.Tensor] = upload.chunks
        if kept is not None:
            chunks = kept.weights if header.keep_weights else chunks
            states = kept.states if header.keep_states else states
        number = 0 if kept is None else kept.version
        shard.staged = Staged(grant, Version(number, shard.tensors.chunks, chunks), states)
        return shard_pb2.InitializeResponse()

    async def activate(self, request: shard_pb2.ActivateRequest) -> shard_pb2.ActivateResponse:
        """Publish the version that is staged under this grant."""
        self._host.process.check_authority(request)
        shard = self._host.ready(active=False)
        if request.timeline != shard.config.timeline:
            raise errors.FencedError(f"this server is on timeline {shard.config.timeline}, not {request.timeline}")
        if not shard.state.active:
            shard.activate(request.grant, request.timeline)
        return shard_pb2.ActivateResponse(version=shard.state.version)


def _fits(parts: Parts | None, filling: shard_pb2.Filling) -> bool:
    """Whether what these parts got is from the shards that are in force."""
    return parts is not None and (parts.timeline, parts.placement) == (filling.timeline, filling.placement)
