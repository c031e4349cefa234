"""The RPCs of one shard. Messages come in, the state machine decides, tensors are worked on in their own thread."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from torch import Tensor

from paramserver import errors
from paramserver.core.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    Build,
    Built,
    CallGone,
    ConsistencyAborted,
    ConsistencyCommitted,
    ConsistencyPrepared,
    DropBuffer,
    DropVersion,
    Effect,
    Event,
    MembersChanged,
    Outcome,
    PullAsked,
    Refusal,
    Refuse,
    WentIdle,
)
from paramserver.core.hypers import Hypers, validate, validate_change
from paramserver.core.names import Name, SyncName
from paramserver.core.plan import Chunk, Kind
from paramserver.core.shard import ShardState
from paramserver.failpoints import reach
from paramserver.server import norms
from paramserver.server.norms import NormExchange
from paramserver.server.receive import Upload, first_non_finite, receive
from paramserver.server.shard import Contribution, ShardTensors, leading
from paramserver.server.version import Version
from paramserver.tensors.codec import encode_frame
from paramserver.tensors.dtypes import buffer_of
from paramserver.tensors.hypers import groups_from_proto
from paramserver.transport.base import Channel
from paramserver.transport.messages import (
    consistency_from_proto,
    consistency_to_proto,
    name_from_proto,
    plan_of,
    unpack_mask,
    want_from_proto,
)
from paramserver.v1 import shard_pb2, types_pb2

log = structlog.get_logger("paramserver.server")

_REFUSALS: dict[Refusal, type[errors.ParamServerError]] = {
    Refusal.FENCED: errors.FencedError,
    Refusal.OUT_OF_ORDER: errors.OutOfOrderError,
    Refusal.STALE: errors.StaleViewError,
    Refusal.MALFORMED: errors.ProtocolError,
    Refusal.GONE: errors.GoneError,
}
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
)
_MAX_WAIT_S = 3600.0
_EXPORT_BYTES = 4 << 20
# Names whose nonce is kept. A repetition comes within seconds, or after a reconnect; this is many steps.
_REMEMBERED = 10_000


class ShardService:
    """One shard behind its RPCs. Lives in one event loop; :meth:`close` ends its thread."""

    def __init__(self, job: str, connect: Callable[[str], Channel], wait_timeout_s: float = 600.0) -> None:
        """``connect`` opens a channel to another shard; ``wait_timeout_s`` bounds the wait for it."""
        self.job = job
        self._norms = NormExchange(connect, job, wait_timeout_s)
        self.failure: str = ""
        # Set by whoever makes this process a member.
        self.incarnation = 0
        # The highest term of a coordinator so far; one of a lower term has been replaced.
        self.term = 0
        # When a worker was last heard of (monotonic seconds).
        self.used_at = time.monotonic()
        self._state: ShardState | None = None
        self._tensors: ShardTensors | None = None
        self._config: shard_pb2.ConfigureRequest | None = None
        self._mine: dict[int, Chunk] = {}
        self._names: dict[int, str] = {}
        self._groups: Sequence[Hypers] = ()
        self._versions: dict[int, Version] = {}
        self._buffers: dict[int, Contribution] = {}
        self._staged: tuple[int, Version] | None = None  # (grant, version 0)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        # Pushes that wait for their answer, and the nonces of those that were counted last.
        self._pushing: dict[int, tuple[Name, int]] = {}
        self._counted: dict[Name, int] = {}
        self._numbers = itertools.count(1)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="arithmetic")
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushed = self._pulled = self._refused = 0
        self._encoding = asyncio.Lock()

    # ---- control

    async def configure(self, request: shard_pb2.ConfigureRequest) -> shard_pb2.ConfigureResponse:
        """Learn the model and this server's part of the plan. Saying it twice changes nothing."""
        self._check_authority(request)
        if self._config is not None and self._config.generation > request.generation:
            raise errors.FencedError(f"configuration of generation {request.generation} is older than the present one")
        if request.index >= request.servers:
            raise errors.ProtocolError(f"server {request.index} of {request.servers} does not exist")
        plan = plan_of(request.model, request.servers)
        digest = plan.layout.digest
        if request.layout_digest and request.layout_digest != digest:
            raise errors.ProtocolError(
                "the coordinator lays this model out differently: run one version of paramserver"
            )
        if self._state is not None and self._tensors is not None and self._tensors.layout.digest == digest:
            return shard_pb2.ConfigureResponse(layout_digest=digest)
        if self._state is not None:
            raise errors.ProtocolError("this shard already holds another model")
        spec = request.model.optimizer
        groups = groups_from_proto(spec.groups)
        validate(spec.name, groups)
        chunks = plan.chunks_of(request.index)
        self._config, self._groups = request, groups
        self._mine = {chunk.index: chunk for chunk in chunks}
        self._names = {w.member: w.name for w in request.workers}
        self._norms.configure(request.index, request.peers)
        self._tensors = ShardTensors(plan.layout, chunks, spec.name)
        self._state = ShardState(
            consistency_from_proto(request.consistency), [w.member for w in request.workers], request.generation
        )
        log.debug("configured", chunks=len(chunks), bytes=sum(c.nbytes for c in chunks), optimizer=spec.name)
        return shard_pb2.ConfigureResponse(layout_digest=digest)

    async def initialize(self, frames: AsyncIterator[bytes]) -> shard_pb2.InitializeResponse:
        """Stage version 0. It is published by :meth:`activate` only, so that no two uploads can mix."""
        state, tensors = self._ready(active=False)

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            self._check_job(header.initialize.job)
            return self._mine, header.initialize.chunks

        upload = await receive(frames, "initialize", expect)
        grant = upload.header.initialize.grant
        if state.active or (self._staged is not None and self._staged[0] > grant):
            raise errors.FencedError("version 0 has been uploaded by somebody else")
        # Buffers and frozen tensors may well hold an infinity, as masks do.
        trained = {i: t for i, t in upload.chunks.items() if self._mine[i].kind is Kind.PARAMETER}
        bad = await self._arithmetic(lambda: first_non_finite(tensors.layout, trained))
        if bad is not None:
            raise errors.NonFiniteError(f"the initial value of {bad!r} is not finite")
        own = await self._arithmetic(lambda: {i: t.clone() for i, t in upload.chunks.items()})
        self._staged = (grant, Version(0, tensors.chunks, own))
        return shard_pb2.InitializeResponse()

    async def activate(self, request: shard_pb2.ActivateRequest) -> shard_pb2.ActivateResponse:
        """Publish the staged version 0 of this grant."""
        self._check_authority(request)
        state, _ = self._ready(active=False)
        if state.active and state.timeline == request.timeline:
            return shard_pb2.ActivateResponse(version=state.version)
        if self._staged is None or self._staged[0] != request.grant:
            raise errors.ProtocolError(f"nothing was uploaded here under grant {request.grant}")
        self._versions = {0: self._staged[1]}
        self._staged = None
        self._happen(Activated(request.timeline))
        return shard_pb2.ActivateResponse(version=0)

    async def set_members(self, request: shard_pb2.SetMembersRequest) -> shard_pb2.SetMembersResponse:
        """Learn who the workers are in this generation. Older news changes nothing."""
        self._check_authority(request)
        self._ready(active=False)
        self._names.update((w.member, w.name) for w in request.workers)
        self._happen(MembersChanged(request.generation, frozenset(w.member for w in request.workers)))
        return shard_pb2.SetMembersResponse()

    async def set_consistency(self, request: shard_pb2.SetConsistencyRequest) -> shard_pb2.SetConsistencyResponse:
        """Prepare, commit or abort another mode or staleness. Saying it twice changes nothing."""
        self._check_authority(request)
        state, _ = self._ready()
        wanted = consistency_from_proto(request.consistency)
        match request.phase:
            case shard_pb2.PHASE_PREPARE:
                self._happen(ConsistencyPrepared(wanted))
            case shard_pb2.PHASE_COMMIT:
                self._happen(ConsistencyCommitted(wanted.revision))
                log.debug("consistency changes", to=str(wanted), from_version=wanted.from_version)
            case shard_pb2.PHASE_ABORT:
                self._happen(ConsistencyAborted(wanted.revision))
            case _:
                raise errors.ProtocolError(f"unknown phase number {request.phase}")
        present = state.scheduled or state.consistency
        return shard_pb2.SetConsistencyResponse(scheduled=present.revision == wanted.revision, version=state.version)

    async def idle(self, request: shard_pb2.IdleRequest) -> shard_pb2.IdleResponse:
        """The worker has nothing to do and holds nobody back until it pulls again."""
        self._check_job(request.job)
        self._ready()
        self._happen(WentIdle(request.worker))
        return shard_pb2.IdleResponse()

    async def stats(self, request: shard_pb2.StatsRequest) -> shard_pb2.StatsResponse:
        """Counters and the present state, for status pages."""
        self._check_job(request.job)
        return self.report()

    def report(self) -> shard_pb2.StatsResponse:
        """What this shard tells the coordinator every now and then."""
        state, tensors = self._state, self._tensors
        if state is None or tensors is None:
            return shard_pb2.StatsResponse(waiting_for="the model", term=self.term, incarnation=self.incarnation)
        missing = state.missing() if state.active else None
        return shard_pb2.StatsResponse(
            version=state.version,
            consistency=consistency_to_proto(state.consistency),
            applied=state.counters.applied,
            duplicate=state.counters.duplicate,
            skipped=tensors.skipped,
            refused=state.counters.refused + self._refused,
            bytes_pushed=self._pushed,
            bytes_pulled=self._pulled,
            max_clock_spread=state.counters.max_clock_spread,
            waiting_for=self._waiting_for(state) if state.active else "version 0",
            generation=state.generation,
            timeline=state.timeline,
            clocks=[shard_pb2.WorkerClock(worker=w, clock=c) for w, c in sorted(state.clocks.items())],
            missing=[types_pb2.Range(start=lo, stop=hi) for lo, hi in missing.slices] if missing else (),
            missing_of=missing.of if missing else 0,
            shard_bytes=sum(chunk.nbytes for chunk in self._mine.values()),
            term=self.term,
            incarnation=self.incarnation,
            holds=tensors.layout.digest,
            active=state.active,
            scheduled=consistency_to_proto(state.scheduled) if state.scheduled else None,
            committed=state.committed,
        )

    def holding(self) -> tuple[str, int]:
        """(layout, timeline) of the shard that this process holds; the layout is empty while it holds none."""
        if self._state is None or self._tensors is None:
            return "", 0
        return self._tensors.layout.digest, self._state.timeline

    async def counted(self, request: shard_pb2.CountedRequest) -> shard_pb2.CountedResponse:
        """The asynchronous slices that are in published versions."""
        self._check_job(request.job)
        state, _ = self._ready()
        response = shard_pb2.CountedResponse()
        for epoch, ranges in sorted(state.counted().items()):
            slices = [types_pb2.Range(start=lo, stop=hi) for lo, hi in ranges]
            response.epochs.append(shard_pb2.EpochSlices(epoch=epoch, slices=slices))
        return response

    # ---- contributions

    async def push(self, frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        """Count a contribution, once. Refused ones change nothing."""
        self.used_at = time.monotonic()
        _, tensors = self._ready()
        used: frozenset[int] = frozenset()

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            nonlocal used
            reach("push.recv", header.push.base_version)
            used = self._checked_used(header.push, tensors)
            return tensors.chunks_used(used), header.push.chunks

        try:
            upload = await receive(frames, "push", expect)
            contribution = self._contribution(upload, tensors, used)
            bad = await self._arithmetic(lambda: first_non_finite(tensors.layout, upload.chunks))
            if bad is not None:
                raise errors.NonFiniteError(
                    f"{contribution.name} of worker {contribution.worker}: the gradient of {bad!r} is not finite"
                )
        except errors.ProtocolError:
            self._refused += 1
            raise
        self._pushed += upload.payload_bytes
        header = upload.header.push
        call, buffer = next(self._numbers), next(self._numbers)
        self._buffers[buffer] = contribution
        reach("push.after_stage", contribution.base_version)
        answer = self._expect_answer(call)
        self._pushing[call] = contribution.name, header.nonce
        reach("step.before_decide", contribution.base_version)
        self._happen(Arrived(call, contribution.name, buffer, header.worker, header.timeline, header.clock))
        pushed: AnswerPush = await answer
        reach("reply.drop", contribution.base_version)
        own = pushed.outcome is Outcome.DUPLICATE and self._counted.get(contribution.name) == header.nonce != 0
        return shard_pb2.PushResponse(outcome=_OUTCOMES[pushed.outcome], version=pushed.version, own=own)

    def _checked_used(self, header: shard_pb2.PushHeader, tensors: ShardTensors) -> frozenset[int]:
        """The tensors that a push has gradients for, once its header has passed all checks."""
        self._check_job(header.job)
        used = unpack_mask(header.used, len(tensors.layout.tensors))
        if not 0 <= header.clip_norm < math.inf:
            raise errors.ProtocolError(f"clip_norm must be finite and not negative, not {header.clip_norm}")
        if header.overflow and used:
            raise errors.ProtocolError("a contribution with the overflow flag must not carry gradients")
        if used and not header.samples:
            raise errors.ProtocolError("a contribution of no samples must not carry gradients")
        self._check_base(header)
        return used

    def _check_base(self, header: shard_pb2.PushHeader) -> None:
        """A gradient must come from the weights of its step, or (asynchronous) from some that were published."""
        assert self._state is not None
        name, base = name_from_proto(header), header.base_version
        if isinstance(name, SyncName):
            if base != name.step:
                raise errors.ProtocolError(f"{name} was computed on version {base}, not on the weights of its step")
        elif header.timeline == self._state.timeline and base > self._state.version:
            raise errors.ProtocolError(f"{name} was computed on version {base}, which this shard has not published")

    def _contribution(self, upload: Upload, tensors: ShardTensors, used: frozenset[int]) -> Contribution:
        header = upload.header.push
        groups = groups_from_proto(header.groups)
        try:
            validate_change(tensors.optimizer, self._groups, groups)
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
            chunks=upload.chunks,
            schedule=header.schedule,
            clip_norm=header.clip_norm,
        )

    # ---- pulls

    async def pull(self, request: shard_pb2.PullRequest) -> AsyncIterator[bytes]:
        """Answer with a whole published version as soon as the state machine says so, or `ready = false` in time."""
        self._check_job(request.job)
        want = want_from_proto(request)
        if not 0 <= request.wait_s <= _MAX_WAIT_S:
            raise errors.ProtocolError(f"wait_s must be between 0 and {_MAX_WAIT_S:g} seconds, not {request.wait_s:g}")
        state, _ = self._ready(active=False)
        call = next(self._numbers)
        answer = self._expect_answer(call)
        self._happen(PullAsked(call, request.worker, want, request.timeline))
        try:
            async with asyncio.timeout(request.wait_s):
                pulled: AnswerPull = await answer
        except TimeoutError:
            header = shard_pb2.PullHeader(
                version=state.version, timeline=state.timeline, waiting_for=self._waiting_for(state)
            )
            yield encode_frame(shard_pb2.FrameHeader(pull=header), ())
            return
        finally:
            self._calls.pop(call, None)
            self._happen(CallGone(call))
        version = self._versions[pulled.version]
        bare = request.header_only or (
            request.HasField("have_version") and request.have_version == version.number and not request.include_frozen
        )
        frozen = request.include_frozen
        header = shard_pb2.PullHeader(
            ready=True,
            version=version.number,
            timeline=state.timeline,
            consistency=consistency_to_proto(state.consistency),
            min_clock=pulled.min_clock,
            skipped=self._tensors.skipped if self._tensors else 0,
            chunks=0 if bare else len(version.moving(frozen)),
            schedule=self._tensors.schedule if self._tensors else shard_pb2.SCHEDULE_UNSPECIFIED,
        )
        yield encode_frame(shard_pb2.FrameHeader(pull=header), ())
        if bare:
            return
        for frame in await self._frames(version, frozen):
            self._pulled += len(frame)
            yield frame

    async def _frames(self, version: Version, frozen: bool) -> list[bytes]:
        if not version.encoded(frozen):
            async with self._encoding:
                await self._arithmetic(lambda: version.frames(frozen))
        return version.frames(frozen)

    async def export(self, request: shard_pb2.ExportRequest) -> AsyncIterator[bytes]:
        """The optimizer state, tensor by tensor, in pieces."""
        self._check_job(request.job)
        _, tensors = self._ready()
        # Copies, since the next step writes into the state itself.
        copies = await self._arithmetic(lambda: [(*e[:3], e[3].clone(), e[4]) for e in tensors.export_state()])
        for tensor, key, start, data, scalar in copies:
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

    # ---- the state machine and its effects

    def _happen(self, event: Event) -> None:
        state = self._state
        assert state is not None
        for effect in state.handle(event):
            self._perform(effect, state)

    def _perform(self, effect: Effect, state: ShardState) -> None:
        match effect:
            case AnswerPush(call, outcome):
                self._note(call, outcome)
                self._settle(call, effect)
            case AnswerPull(call):
                self._settle(call, effect)
            case Refuse(call, refusal, reason):
                self._pushing.pop(call, None)
                future = self._calls.pop(call, None)
                if future is not None and not future.done():
                    future.set_exception(_REFUSALS[refusal](reason))
            case DropBuffer(buffer):
                self._buffers.pop(buffer, None)
            case DropVersion(version):
                self._versions.pop(version, None)
            case Build():
                reach("step.after_decide", state.version)
                task = asyncio.get_running_loop().create_task(self._build(effect, state))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _settle(self, call: int, answer: AnswerPush | AnswerPull) -> None:
        future = self._calls.pop(call, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _note(self, call: int, outcome: Outcome) -> None:
        """Remember for a while whose contribution was counted under a name."""
        name, nonce = self._pushing.pop(call)
        if outcome is Outcome.ACCEPTED:
            self._counted[name] = nonce
            if len(self._counted) > _REMEMBERED:
                del self._counted[next(iter(self._counted))]

    async def _build(self, effect: Build, state: ShardState) -> None:
        tensors = self._tensors
        assert tensors is not None
        contributions = [self._buffers[buffer] for buffer in effect.buffers]
        base = self._versions[state.version]
        try:
            clipped = await self._clipped(base, contributions, state)
            version = await self._arithmetic(lambda: tensors.build(base, contributions, clipped))
        except Exception as error:  # the top of a task: a shard that cannot apply must not go on silently
            log.exception("could not apply", step=state.version)
            self.fail(f"could not apply step {state.version}: {error}")
            return
        reach("commit.before_log", base.number)
        self._versions[version.number] = version
        for buffer in effect.buffers:
            self._buffers.pop(buffer, None)
        self._happen(Built(version.number))
        reach("commit.after_log_before_reply", base.number)

    async def _clipped(
        self, base: Version, contributions: Sequence[Contribution], state: ShardState
    ) -> Mapping[int, Tensor] | None:
        """The step's gradients, clipped by the norm over all shards; None where nothing is to be clipped."""
        tensors, limit = self._tensors, leading(contributions).clip_norm
        if tensors is None or limit <= 0:
            return None
        gradients = await self._arithmetic(lambda: tensors.gradients(base, contributions))
        mine = await self._arithmetic(lambda: norms.squares(gradients))
        everybodys = await self._norms.exchange(state.timeline, base.number, mine)
        return await self._arithmetic(lambda: norms.clip(gradients, everybodys, limit))

    async def share_norms(self, request: shard_pb2.ShareNormsRequest) -> shard_pb2.ShareNormsResponse:
        """Another shard tells the norm of its part of a step's gradient."""
        self._check_job(request.job)
        state, _ = self._ready()
        if request.timeline != state.timeline:
            raise errors.FencedError(f"norms of timeline {request.timeline}, this shard is on {state.timeline}")
        await self._norms.hear(request, state.version)
        return shard_pb2.ShareNormsResponse()

    def fail(self, reason: str) -> None:
        """End the shard: whoever waits, or asks from now on, is told why."""
        self.failure = self.failure or reason
        for future in self._calls.values():
            if not future.done():
                future.set_exception(errors.JobFailedError(self.failure))
        self._calls.clear()

    def _expect_answer(self, call: int) -> asyncio.Future[Any]:
        self._calls[call] = future = asyncio.get_running_loop().create_future()
        return future

    async def _arithmetic(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # ---- checks

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

    def _ready(self, active: bool = True) -> tuple[ShardState, ShardTensors]:
        if self.failure:
            raise errors.JobFailedError(self.failure)
        if self._state is None or self._tensors is None:
            raise errors.UnavailableError("this server has not been told its part of a model yet: try again")
        if active and not self._state.active:
            raise errors.UnavailableError("version 0 is not published yet: try again")
        return self._state, self._tensors

    def _waiting_for(self, state: ShardState) -> str:
        if self._norms.waiting_for:
            return self._norms.waiting_for
        if missing := state.missing():
            return str(missing)
        slow = [self._names.get(worker, f"worker {worker}") for worker in state.holding_back()]
        return f"clock {state.min_clock}: {', '.join(slow)}" if slow and state.parked else ""

    async def close(self) -> None:
        """Answer everybody and end the arithmetic thread."""
        self.fail("the server stops")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._norms.close()
        self._pool.shutdown(wait=True)
