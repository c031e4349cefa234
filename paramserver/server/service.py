"""The RPCs of one server. Messages come in and are checked; the shard of the present timeline decides."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TypeVar

import structlog
from torch import Tensor

from paramserver import errors
from paramserver.checkpoint import manifest as manifests
from paramserver.compress.base import Compressor
from paramserver.compress.registry import FOR_PULL, reader
from paramserver.core.consistency import Mode
from paramserver.core.events import (
    ConsistencyAborted,
    ConsistencyCommitted,
    ConsistencyPrepared,
    Held,
    MembersChanged,
    Outcome,
    PullAsked,
    WentIdle,
)
from paramserver.core.hypers import validate, validate_change
from paramserver.core.names import SyncName
from paramserver.core.plan import Chunk, Kind
from paramserver.core.shard import ShardState
from paramserver.failpoints import reach
from paramserver.server.ahead import Ahead
from paramserver.server.apply import StateEntry
from paramserver.server.intake import Intake
from paramserver.server.norms import NormExchange
from paramserver.server.receive import first_non_finite, receive
from paramserver.server.reporting import epoch_slices, ledger_response, report, waiting_for
from paramserver.server.restoring import restore
from paramserver.server.running import RunningShard
from paramserver.server.saving import Saver, place_of
from paramserver.server.shard import Contribution, ShardTensors
from paramserver.server.team import Team
from paramserver.server.version import Version, room_for
from paramserver.tensors.codec import encode_frame
from paramserver.tensors.dtypes import buffer_of
from paramserver.tensors.hypers import groups_from_proto
from paramserver.transport import local
from paramserver.transport.base import Caller, Channel, caller
from paramserver.transport.messages import (
    consistency_from_proto,
    consistency_to_proto,
    name_from_proto,
    plan_of,
    unpack_mask,
    want_from_proto,
)
from paramserver.transport.policy import WORKER
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.server")

_OUTCOMES = {
    Outcome.ACCEPTED: shard_pb2.OUTCOME_ACCEPTED,
    Outcome.DUPLICATE: shard_pb2.OUTCOME_DUPLICATE,
}
T = TypeVar("T")
_Command = (
    shard_pb2.ConfigureRequest
    | shard_pb2.ActivateRequest
    | shard_pb2.SetMembersRequest
    | shard_pb2.SetConsistencyRequest
    | shard_pb2.CutRequest
    | shard_pb2.ReleaseRequest
)
_A_WORKER = Caller(frozenset({WORKER}), admin=False)
_MAX_WAIT_S = 3600.0
_EXPORT_BYTES = 4 << 20
# No longer than this does a checkpoint hold workers back.
_HELD_S = 30.0


class ShardService:
    """One server behind its RPCs. Lives in one event loop; :meth:`close` ends its threads."""

    def __init__(
        self, job: str, connect: Callable[[str], Channel], wait_timeout_s: float = 600.0, threads: int = 1
    ) -> None:
        """``connect`` opens a channel to another server; ``wait_timeout_s`` bounds the wait for it.

        ``threads``: how many work on chunks side by side.
        """
        self.job = job
        self.failure: str = ""
        # Set by whoever makes this process a member.
        self.incarnation = 0
        # Called when there is something to report that should not wait for the next regular report.
        self.news: Callable[[], None] = lambda: None
        # The highest term of a coordinator so far; one of a lower term has been replaced.
        self.term = 0
        self.intake = Intake()
        # When a worker was last heard of (monotonic seconds).
        self.used_at = time.monotonic()
        self._connect, self._wait_timeout_s = connect, wait_timeout_s
        self._shard: RunningShard | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="arithmetic")
        self._team = Team(threads)
        # A pull does not wait for the version that is being made.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._pushed = self._pulled = self._refused = 0
        self._encoding = asyncio.Lock()
        self._replacing = asyncio.Lock()

    # ---- control

    async def configure(self, request: shard_pb2.ConfigureRequest) -> shard_pb2.ConfigureResponse:
        """Learn the model and this server's part of the plan. Saying it twice changes nothing."""
        self._check_authority(request)
        async with self._replacing:
            shard = self._shard
            if shard is not None and not request.anew:
                if shard.config.generation > request.generation:
                    raise errors.FencedError(
                        f"configuration of generation {request.generation} is older than the present one"
                    )
                if shard.digest != plan_of(request.model, request.servers).layout.digest:
                    raise errors.ProtocolError("this shard already holds another model")
                return shard_pb2.ConfigureResponse(layout_digest=shard.digest)
            made = self._make(request)
            await self._replace(made)
        log.debug("configured", chunks=len(made.chunks), bytes=sum(c.nbytes for c in made.chunks.values()))
        return shard_pb2.ConfigureResponse(layout_digest=made.digest)

    def _make(self, request: shard_pb2.ConfigureRequest) -> RunningShard:
        """A shard as configured, with nothing in it. Raises ProtocolError, ModelError."""
        if request.index >= request.servers:
            raise errors.ProtocolError(f"server {request.index} of {request.servers} does not exist")
        plan = plan_of(request.model, request.servers)
        if request.layout_digest and request.layout_digest != plan.layout.digest:
            raise errors.ProtocolError(
                "the coordinator lays this model out differently: run one version of paramserver"
            )
        spec = request.model.optimizer
        groups = groups_from_proto(spec.groups)
        validate(spec.name, groups)
        state = ShardState(
            consistency_from_proto(request.consistency), [w.member for w in request.workers], request.generation
        )
        state.timeline = request.timeline
        exchange = NormExchange(self._connect, self.job, self._wait_timeout_s)
        exchange.configure(request.index, request.peers)
        place = place_of(request)
        saver = Saver(place, plan, request, self._connect, lambda: self.news()) if place is not None else None
        tensors = ShardTensors(plan.layout, plan.chunks_of(request.index), spec.name, self._team)
        return RunningShard(request, plan, groups, state, tensors, exchange, self._pool, saver, self.fail)

    async def _replace(self, made: RunningShard) -> None:
        former, self._shard = self._shard, made
        if former is not None:
            former.end(errors.RolledBackError(f"this server is on timeline {made.config.timeline} now"))
            await former.close()

    async def restore(self, request: shard_pb2.RestoreRequest) -> shard_pb2.RestoreResponse:
        """Take a checkpoint in, on a new timeline; :meth:`activate` publishes it. May be repeated.

        Raises CheckpointError if the files are damaged or do not fit.
        """
        self._check_authority(request.configure)
        async with self._replacing:
            timeline = request.configure.timeline
            if self._shard is not None and timeline < self._shard.config.timeline:
                raise errors.FencedError(f"this server is on timeline {self._shard.config.timeline} already")
            if self._shard is not None:  # nothing of the old timeline counts any more
                self._shard.end(errors.RolledBackError(f"the job goes back to a checkpoint, on timeline {timeline}"))
            made = self._make(request.configure)
            place = place_of(request.configure)
            if place is None:
                raise errors.ProtocolError("there is no place with checkpoints to restore from")
            reach("restore.before_load")
            manifest = manifests.decode(request.manifest.encode())
            restored = await self._arithmetic(lambda: restore(place, manifest, made.plan.layout, made.tensors))
            reach("restore.after_load")
            facts = restored.facts
            made.state.restore(facts.counted, facts.applied, facts.rows, facts.folded_steps)
            made.names = {**facts.names, **made.names}
            made.staged, made.restored = (request.grant, restored.version), True
            await self._replace(made)
        return shard_pb2.RestoreResponse(version=manifest.version, layout_digest=made.digest)

    async def initialize(self, frames: AsyncIterator[bytes]) -> shard_pb2.InitializeResponse:
        """Stage version 0. It is published by :meth:`activate` only, so that no two uploads can mix."""
        shard = self._ready(active=False)

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            self._check_job(header.initialize.job)
            return shard.chunks, header.initialize.chunks

        # Copied as they come, so that the messages need not all be kept.
        room = room_for(shard.chunks.values())
        upload = await receive(frames, "initialize", expect, lambda chunk, values: room[chunk.index].copy_(values))
        grant = upload.header.initialize.grant
        if shard.state.active or (shard.staged is not None and shard.staged[0] > grant):
            raise errors.FencedError("version 0 has been uploaded by somebody else")
        if shard.restored:
            raise errors.FencedError("this shard goes on from a checkpoint")
        # Buffers and frozen tensors may well hold an infinity, as masks do.
        trained = {i: t for i, t in upload.chunks.items() if shard.chunks[i].kind is Kind.PARAMETER}
        bad = await self._arithmetic(lambda: first_non_finite(shard.tensors.layout, trained))
        if bad is not None:
            raise errors.NonFiniteError(f"the initial value of {bad!r} is not finite")
        shard.staged = (grant, Version(0, shard.tensors.chunks, upload.chunks))
        return shard_pb2.InitializeResponse()

    async def activate(self, request: shard_pb2.ActivateRequest) -> shard_pb2.ActivateResponse:
        """Publish the version that is staged under this grant."""
        self._check_authority(request)
        shard = self._ready(active=False)
        if request.timeline != shard.config.timeline:
            raise errors.FencedError(f"this server is on timeline {shard.config.timeline}, not {request.timeline}")
        if not shard.state.active:
            shard.activate(request.grant, request.timeline)
        return shard_pb2.ActivateResponse(version=shard.state.version)

    async def set_members(self, request: shard_pb2.SetMembersRequest) -> shard_pb2.SetMembersResponse:
        """Learn who the workers are in this generation. Older news changes nothing."""
        self._check_authority(request)
        shard = self._ready(active=False)
        shard.names.update((w.member, w.name) for w in request.workers)
        workers = frozenset(w.member for w in request.workers)
        if request.generation >= shard.state.generation:
            shard.sharing.keep(workers)
        shard.happen(MembersChanged(request.generation, workers))
        shard.claims.keep(workers)
        return shard_pb2.SetMembersResponse()

    async def set_consistency(self, request: shard_pb2.SetConsistencyRequest) -> shard_pb2.SetConsistencyResponse:
        """Prepare, commit or abort another mode or staleness. Saying it twice changes nothing."""
        self._check_authority(request)
        shard = self._ready()
        wanted = consistency_from_proto(request.consistency)
        match request.phase:
            case shard_pb2.PHASE_PREPARE:
                shard.happen(ConsistencyPrepared(wanted))
            case shard_pb2.PHASE_COMMIT:
                shard.happen(ConsistencyCommitted(wanted.revision))
                log.debug("consistency changes", to=str(wanted), from_version=wanted.from_version)
            case shard_pb2.PHASE_ABORT:
                shard.happen(ConsistencyAborted(wanted.revision))
            case _:
                raise errors.ProtocolError(f"unknown phase number {request.phase}")
        present = shard.state.scheduled or shard.state.consistency
        return shard_pb2.SetConsistencyResponse(
            scheduled=present.revision == wanted.revision, version=shard.state.version
        )

    async def attach(self, request: shard_pb2.AttachRequest) -> shard_pb2.AttachResponse:
        """Share memory with a worker on this host; the answer says why if that cannot be."""
        self._check_job(request.job)
        shard = self._ready(active=False)
        if request.timeline != shard.config.timeline:
            raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}, not {request.timeline}")
        if request.layout_digest != shard.digest:
            raise errors.ProtocolError("this shard holds another model")
        ours, theirs = socket.socketpair()
        with ExitStack() as unless_served:
            unless_served.enter_context(ours)
            with theirs:
                response = shard.sharing.attach(request, theirs.fileno())
            if response.attachment:
                line = await local.serve(ours, [("Shard", self)], caller() or _A_WORKER)
                unless_served.pop_all()
                shard.sharing.answer(response.attachment, line)
        return response

    async def idle(self, request: shard_pb2.IdleRequest) -> shard_pb2.IdleResponse:
        """The worker has nothing to do and holds nobody back until it pulls again."""
        self._check_job(request.job)
        self._ready().happen(WentIdle(request.worker))
        return shard_pb2.IdleResponse()

    async def claim(self, request: shard_pb2.ClaimRequest) -> shard_pb2.ClaimResponse:
        """A slice of the open step for a worker that has time, if there is a useful one."""
        self._check_job(request.job)
        shard = self._ready()
        return shard.claims.answer(request, shard.state)

    # ---- checkpoints

    async def cut(self, request: shard_pb2.CutRequest) -> shard_pb2.CutResponse:
        """Hold the workers back, copy a version for a checkpoint, or let them go on."""
        self._check_authority(request)
        shard = self._on(request.timeline)
        taken = False
        match request.step:
            case shard_pb2.CutRequest.STEP_HOLD:
                shard.happen(Held(True))
                # Should the coordinator be lost before it lets them go.
                asyncio.get_running_loop().call_later(_HELD_S, shard.happen, Held(False))
            case shard_pb2.CutRequest.STEP_LET_GO:
                shard.happen(Held(False))
            case shard_pb2.CutRequest.STEP_COPY:
                if shard.saver is None:
                    raise errors.ProtocolError("there is no place for checkpoints")
                if shard.can_cut(request.version):
                    # Of a synchronous job the coordinator asks for the last version only.
                    taken = shard.copy(shard.versions[request.version], shard.state.consistency.mode is Mode.ASYNC)
            case _:
                raise errors.ProtocolError(f"unknown step number {request.step}")
        return shard_pb2.CutResponse(taken=taken, version=shard.state.version)

    async def release(self, request: shard_pb2.ReleaseRequest) -> shard_pb2.ReleaseResponse:
        """Copies of these versions are needed no more."""
        self._check_authority(request)
        shard = self._on(request.timeline)
        if shard.saver is not None:
            shard.saver.release(request.versions)
        return shard_pb2.ReleaseResponse()

    async def copied(self, request: shard_pb2.CopiedRequest) -> AsyncIterator[bytes]:
        """Chunks of a copy, for a server that writes a tensor of which they are a part."""
        self._check_job(request.job)
        shard = self._on(request.timeline)
        if shard.saver is None:
            raise errors.ProtocolError("there is no place for checkpoints")
        for frame in await shard.saver.copied(request.version, list(request.chunks)):
            yield frame

    def _on(self, timeline: int) -> RunningShard:
        shard = self._ready()
        if timeline != shard.config.timeline:
            raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}, not {timeline}")
        return shard

    # ---- facts

    async def stats(self, request: shard_pb2.StatsRequest) -> shard_pb2.StatsResponse:
        """Counters and the present state, for status pages."""
        self._check_job(request.job)
        return self.report()

    def report(self) -> shard_pb2.StatsResponse:
        """What this server tells the coordinator every now and then."""
        response = report(self._shard)
        response.term, response.incarnation = self.term, self.incarnation
        response.refused += self._refused
        response.bytes_pushed, response.bytes_pulled = self._pushed, self._pulled
        return response

    @property
    def buffered(self) -> int:
        """Contributions that are kept because they are in no version yet."""
        return len(self._shard.buffers) if self._shard is not None else 0

    def holding(self) -> tuple[str, int]:
        """(layout, timeline) of the shard that this process holds; the layout is empty while it holds none."""
        return (self._shard.digest, self._shard.config.timeline) if self._shard is not None else ("", 0)

    async def counted(self, request: shard_pb2.CountedRequest) -> shard_pb2.CountedResponse:
        """The asynchronous slices that are in published versions."""
        self._check_job(request.job)
        return shard_pb2.CountedResponse(epochs=epoch_slices(self._ready().state))

    async def ledger(self, request: shard_pb2.LedgerRequest) -> shard_pb2.LedgerResponse:
        """What has been counted, and who brought it."""
        self._check_job(request.job)
        shard = self._ready()
        return ledger_response(shard)

    # ---- contributions

    async def push(self, frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        """Count a contribution, once. Refused ones change nothing."""
        self.used_at = time.monotonic()
        shard = self._ready()
        chunks: dict[int, Tensor] = {}
        lying: dict[int, Tensor] = {}
        coming: Contribution | None = None
        drafted = False

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            nonlocal coming, drafted
            reach("push.recv", header.push.base_version)
            used = self._checked_used(header.push, shard)
            arriving.enter_context(self.intake.arriving(shard.queued, shard.nbytes))
            needed = shard.tensors.chunks_used(used)
            coming = _contribution(header.push, chunks, shard, used)
            if header.push.HasField("shared"):
                lying.update(shard.sharing.contribution(header.push.shared, header.push.worker, needed))
                needed = {}
            else:
                drafted = shard.drafts(coming, header.push)
            return needed, header.push.chunks

        def came(chunk: int) -> None:
            if drafted and coming is not None:
                shard.drafting.came(coming, chunk)

        try:
            with ExitStack() as arriving:
                upload = await receive(frames, "push", expect, chunks=chunks, came=came, decode=self._arithmetic)
                chunks.update(lying)
                contribution = coming
                assert contribution is not None, "the first header has been looked at"
                bad = None
                if contribution.checked:
                    bad = await shard.arithmetic(lambda: first_non_finite(shard.tensors.layout, contribution.chunks))
            if bad is not None:
                raise errors.NonFiniteError(
                    f"{contribution.name} of worker {contribution.worker}: the gradient of {bad!r} is not finite"
                )
        except BaseException as error:
            if coming is not None and drafted:
                shard.drafting.fails(coming)
            if isinstance(error, errors.ProtocolError):
                self._refused += 1
            raise
        self._pushed += upload.payload_bytes + sum(tensor.nbytes for tensor in lying.values())
        pushed, own = await shard.push(contribution, upload.header.push)
        reach("reply.drop", contribution.base_version)
        return shard_pb2.PushResponse(outcome=_OUTCOMES[pushed.outcome], version=pushed.version, own=own)

    def _checked_used(self, header: shard_pb2.PushHeader, shard: RunningShard) -> frozenset[int]:
        """The tensors that a push has gradients for, once its header has passed all checks."""
        self._check_job(header.job)
        used = unpack_mask(header.used, len(shard.tensors.layout.tensors))
        if not 0 <= header.clip_norm < math.inf:
            raise errors.ProtocolError(f"clip_norm must be finite and not negative, not {header.clip_norm}")
        if header.overflow and used:
            raise errors.ProtocolError("a contribution with the overflow flag must not carry gradients")
        if used and not header.samples:
            raise errors.ProtocolError("a contribution of no samples must not carry gradients")
        _check_base(header, shard.state)
        return used

    # ---- pulls

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

    async def export(self, request: shard_pb2.ExportRequest) -> AsyncIterator[bytes]:
        """The optimizer state, tensor by tensor, in pieces."""
        self._check_job(request.job)
        shard = self._ready()
        tensors = shard.tensors
        # As it is between two steps; a step that comes meanwhile copies first what it changes.
        copy = await shard.arithmetic(tensors.copy_states)
        try:
            for index in sorted(tensors.states):
                for entry in await shard.arithmetic(partial(copy.use, index)):
                    for frame in _state_frames(entry):
                        yield frame
        finally:
            tensors.drop_copy(copy)

    async def share_norms(self, request: shard_pb2.ShareNormsRequest) -> shard_pb2.ShareNormsResponse:
        """Another shard tells the norm of its part of a step's gradient."""
        self._check_job(request.job)
        shard = self._ready()
        if request.timeline != shard.state.timeline:
            raise errors.FencedError(f"norms of timeline {request.timeline}, this shard is on {shard.state.timeline}")
        await shard.norms.hear(request, shard.state.version)
        return shard_pb2.ShareNormsResponse()

    # ---- the end

    def fail(self, reason: str) -> None:
        """End the server: whoever waits, or asks from now on, is told why."""
        self.failure = self.failure or reason
        if self._shard is not None:
            self._shard.end(errors.JobFailedError(self.failure))

    async def close(self) -> None:
        """Answer everybody and end the threads."""
        self.fail("the server stops")
        if self._shard is not None:
            await self._shard.close()
        self._pool.shutdown(wait=True)
        self._team.close()
        self._encoder.shutdown(wait=True)

    # ---- checks

    async def _arithmetic(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _check_authority(self, request: _Command) -> None:
        """A command must come from the coordinator that leads the job now."""
        self._check_job(request.job)
        if request.term < self.term:
            raise errors.FencedError(
                f"this coordinator (term {request.term}) has been replaced: server follows term {self.term}"
            )
        self.term = request.term

    def _check_job(self, job: str) -> None:
        if job != self.job:
            raise errors.FencedError(f"this server belongs to job {self.job!r}, the message to {job[:100]!r}")

    def _ready(self, active: bool = True) -> RunningShard:
        if self.failure:
            raise errors.JobFailedError(self.failure)
        if self._shard is None:
            raise errors.UnavailableError("this server has not been told its part of a model yet: try again")
        if active and not self._shard.state.active:
            raise errors.UnavailableError("version 0 is not published yet: try again")
        return self._shard


def _state_frames(entry: StateEntry) -> Iterator[bytes]:
    """Optimizer state in pieces."""
    tensor, key, start, data, scalar = entry
    flat = data.reshape(-1)
    step = max(1, _EXPORT_BYTES // flat.element_size())
    for offset in range(0, flat.numel(), step):
        part = flat[offset : offset + step].contiguous()
        ref = shard_pb2.StateRef(
            tensor=tensor,
            key=key,
            start=start + offset,
            bytes=part.numel() * part.element_size(),
            dtype=str(part.dtype).removeprefix("torch."),
            scalar=scalar,
        )
        yield encode_frame(shard_pb2.FrameHeader(states=[ref]), [buffer_of(part)])


def _check_base(header: shard_pb2.PushHeader, state: ShardState) -> None:
    """A gradient must come from the weights of its step, or (asynchronous) from some that were published."""
    name, base = name_from_proto(header), header.base_version
    if isinstance(name, SyncName):
        if base != name.step:
            raise errors.ProtocolError(f"{name} was computed on version {base}, not on the weights of its step")
    elif header.timeline == state.timeline and base > state.version:
        raise errors.ProtocolError(f"{name} was computed on version {base}, which this shard has not published")


def _contribution(
    header: shard_pb2.PushHeader, chunks: Mapping[int, Tensor], shard: RunningShard, used: frozenset[int]
) -> Contribution:
    groups: Sequence[Mapping[str, float | bool | tuple[float, ...]]] = groups_from_proto(header.groups)
    try:
        validate_change(shard.tensors.optimizer, shard.groups, groups)
    except errors.ModelError as error:
        raise errors.ProtocolError(str(error)) from error
    return Contribution(
        name=name_from_proto(header),
        worker=header.worker,
        samples=header.samples,
        overflow=header.overflow,
        base_version=header.base_version,
        used=used,
        groups=tuple(groups),
        chunks=chunks,
        schedule=header.schedule,
        clip_norm=header.clip_norm,
        # What this server would have to read for that alone, it reads when it sums.
        checked=not (header.HasField("shared") and header.shared.checked),
    )
