"""One shard on one timeline: carries out the effects of its state machine. A roll-back replaces the whole object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from paramserver import errors
from paramserver.checkpoint.contents import ShardFacts
from paramserver.core.layout.hypers import Hypers
from paramserver.core.layout.plan import Plan
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    AtClock,
    Build,
    Built,
    CallGone,
    DropBuffer,
    DropVersion,
    Effect,
    Event,
    Outcome,
    PullAsked,
    Refusal,
    Refuse,
)
from paramserver.core.work.stealing import Stealing
from paramserver.failpoints import planned, reach
from paramserver.server.arithmetic.hypers import Hyperparameters
from paramserver.server.arithmetic.norms import NormExchange
from paramserver.server.arithmetic.state import State, StateCopy
from paramserver.server.arithmetic.thread import ArithmeticThread
from paramserver.server.making import Maker
from paramserver.server.replicas.copies import Copies
from paramserver.server.saving.holding import Holding
from paramserver.server.saving.kept import Kept
from paramserver.server.saving.saver import Saver
from paramserver.server.saving.statecopies import StateCopies
from paramserver.server.times import Times
from paramserver.server.traced import ShardTrace
from paramserver.server.versions.acks import Acks
from paramserver.server.versions.calls import Calls
from paramserver.server.versions.drafting import Draft, Drafting
from paramserver.server.versions.repetitions import Repetitions
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.sharing import Sharing
from paramserver.server.versions.version import Version
from paramserver.tracing import Recorder
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.server")

_REFUSALS: dict[Refusal, type[errors.ParamServerError]] = {
    Refusal.FENCED: errors.FencedError,
    Refusal.ROLLED_BACK: errors.RolledBackError,
    Refusal.OUT_OF_ORDER: errors.OutOfOrderError,
    Refusal.STALE: errors.StaleViewError,
    Refusal.MALFORMED: errors.ProtocolError,
    Refusal.GONE: errors.GoneError,
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Staged:
    """The first version of a timeline, published when the grant says so, and the optimizer state that was brought."""

    grant: int
    version: Version
    states: Mapping[int, State] = field(default_factory=dict)


class RunningShard:
    """State machine, tensors and waiting calls of one shard on one timeline. Lives in one event loop.

    ``pool`` is the thread for arithmetic; ``failed`` is called once, with the reason, when the shard cannot go on.
    ``connect`` opens a channel to a backup; ``told`` is called when a backup has all of the shard.
    ``shares``: backups on this host may read this process's memory.
    """

    def __init__(
        self,
        config: shard_pb2.ConfigureRequest,
        plan: Plan,
        groups: Sequence[Hypers],
        state: ShardState,
        tensors: ShardTensors,
        norms_: NormExchange,
        pool: ThreadPoolExecutor,
        saver: Saver | None,
        failed: Callable[[str], None],
        connect: Callable[[str], Channel],
        told: Callable[[], None] = lambda: None,
        shares: bool = False,
        trace: Recorder | None = None,
    ) -> None:
        self.config, self.plan = config, plan
        self.hypers = Hyperparameters(tensors.optimizers, groups)
        self.state, self.tensors, self.norms = state, tensors, norms_
        self.saver = saver
        self.sharing = Sharing(plan, config.shard)
        self.digest = plan.layout.digest
        self.chunks = {chunk.index: chunk for chunk in plan.chunks_of(config.shard)}
        self.nbytes = sum(chunk.nbytes for chunk in self.chunks.values())
        self.thread = ArithmeticThread(pool, self.nbytes)
        # Of all workers that there have been, by member number.
        self.names = {worker.member: worker.name for worker in config.workers}
        self.trace = ShardTrace(trace or Recorder(), config.shard, lambda: self.names)
        self.staged: Staged | None = None
        # The shard goes on from a checkpoint: nobody uploads anything.
        self.restored = False
        # The state of this shard on the previous timeline, to which a worker uploads weights or optimizer state.
        self.kept: Kept | None = None
        self.versions: dict[int, Version] = {}
        self.buffers: dict[int, Contribution] = {}
        self.stealing = Stealing()
        self.copies = Copies(self, connect, norms_.wait_s, told, shares)
        self.drafting = Drafting(tensors, self.arithmetic, self.copies.content, self.copies.drafted, self.trace)
        self._maker = Maker(tensors, norms_, self.arithmetic, self.trace)
        self.acks = Acks()
        self.times = Times(config.timeline)
        self._failed = failed
        self._calls = Calls()
        self.state_copies = StateCopies(tensors, self._calls)
        self.repetitions = Repetitions()
        self._tasks: set[asyncio.Task[None]] = set()
        self._building = False
        # Done when the next version is published.
        self._moved: asyncio.Future[None] | None = None
        self.holding = Holding(saver, self.happen)

    # ---- contributions and pulls

    @property
    def queued(self) -> int:
        """Asynchronous contributions that wait to be applied; a synchronous step waits for more, not for less."""
        return len(self.buffers) if self.state.consistency.mode is Mode.ASYNC else 0

    @property
    def making(self) -> bool:
        """Whether a version is being made."""
        return self._building

    def moved(self) -> asyncio.Future[None]:
        """Done when the next version is published, or the shard has ended."""
        if self._moved is None or self._moved.done():
            self._moved = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._moved)

    async def push(
        self, contribution: Contribution, header: shard_pb2.PushHeader, filler: bool = False
    ) -> tuple[AnswerPush, bool]:
        """Count a contribution that has passed all checks; the answer, and whether it was counted before itself.

        ``filler``: it stands for slices that will never come.
        """
        call, buffer = self._calls.number(), self.have(contribution)
        self.times.came(buffer)
        reach("push.after_stage", contribution.base_version)
        answer = self._calls.expect(call)
        self.repetitions.pushed(call, contribution.name, header.nonce)
        reach("step.before_decide", contribution.base_version)
        self.happen(Arrived(call, contribution.name, buffer, header.worker, header.timeline, header.clock, filler))
        pushed: AnswerPush = await answer
        duplicate = pushed.outcome is Outcome.DUPLICATE
        return pushed, duplicate and self.repetitions.counted(contribution.name, header.nonce)

    def have(self, contribution: Contribution) -> int:
        """Keep a contribution; the number of its buffer."""
        buffer = self._calls.number()
        self.buffers[buffer] = contribution
        if self.trace.recorder.on:
            self.trace.came(buffer)
        return buffer

    def drafts(self, contribution: Contribution, header: shard_pb2.PushHeader, lacks: Iterable[int] = ()) -> None:
        """A contribution begins to arrive; the next version may be made ahead of time. ``lacks``: chunks to come."""
        # A planned fault strikes while a version is made, not before.
        faults = planned("apply.mid") or planned("apply.after_weights_before_opt")
        if header.timeline == self.state.timeline and not faults:
            self.drafting.begins(contribution, lacks)

    async def pull(self, ask: Callable[[int], PullAsked], wait_s: float) -> AnswerPull | None:
        """The answer to the question that ``ask`` makes out of the number of the call; None if none comes in time."""
        call = self._calls.number()
        answer = self._calls.expect(call)
        asked, trace = ask(call), self.trace
        pulled: AnswerPull | None = None
        began = trace.recorder.now() if trace.recorder.on else 0
        self.happen(asked)
        behind: Sequence[int] = ()
        if isinstance(asked.want, AtClock) and not answer.done():
            behind = self.state.pulls.slowest_workers()
            self.times.slowest(behind, self.state.pulls.floor)
            self.times.waits(asked.worker, asked.want.clock)
        try:
            async with asyncio.timeout(wait_s):
                pulled = await answer
                if isinstance(asked.want, AtClock):
                    self.times.goes_on(asked.worker)
                return pulled
        except TimeoutError:
            return None
        finally:
            if began:
                trace.pulled(asked.worker, began, pulled, behind)
            self._calls.forget(call)
            self.happen(CallGone(call))

    async def state_from(self, version: int, wait_s: float) -> tuple[int, StateCopy] | None:
        """A copy of the optimizer state of ``version`` or a later one, and of which; None if none comes in time.

        Give it back with `ShardTensors.drop_copy`.
        """
        if self._calls.ended is not None:
            raise self._calls.ended
        if self.state.version >= version and not self._building:
            return self.state.version, self.tensors.copy_states()
        return await self.state_copies.wait(version, wait_s)

    # ---- versions

    def activate(self, grant: int, timeline: int) -> None:
        """Publish the version that was staged under this grant. Raises ProtocolError if there is none."""
        if self.staged is None or self.staged.grant != grant:
            raise errors.ProtocolError(f"nothing was uploaded here under grant {grant}")
        version = self.staged.version
        self.tensors.states.update(self.staged.states)
        self.staged = None
        version.ever_used = self.tensors.ever_used
        self.versions = {version.number: version}
        if self.saver is not None and not self.restored:
            self.copy(version)
        self.kept = None
        self.happen(Activated(timeline, version.number))
        self.drafting.opened(version)

    def keep(self) -> Kept:
        """A copy of the newest version of this shard, which is at rest, for its successor. In the arithmetic thread."""
        return Kept.of(self.versions[self.state.version], self.state, self.tensors, self.names)

    def begin_with(self, facts: ShardFacts) -> None:
        """Begin where another shard was; the weights are still to be staged."""
        self.state.restore(facts.counted, facts.applied, facts.rows, facts.folded_steps)
        self.names = {**facts.names, **self.names}
        self.tensors.skipped, self.tensors.samples = facts.skipped, facts.samples
        self.tensors.advances = facts.advances
        self.tensors.ever_used = facts.ever_used.intersection(range(len(self.tensors.layout.tensors)))

    def copy(self, version: Version, hurry: bool = True) -> bool:
        """Take a copy of the newest version for a checkpoint; False if too many are not released yet.

        ``hurry``: the next step is expected before it is written.
        """
        assert self.saver is not None
        return self.saver.take(version, self.tensors, self.state, self.names, hurry)

    def can_cut(self, version: int) -> bool:
        """Whether ``version`` is the newest one, and no newer one is being made."""
        return self.state.active and self.state.version == version and not self._building

    # ---- the state machine and its effects

    def happen(self, event: Event) -> None:
        """Tell the state machine, and perform its effects."""
        if self._calls.ended is not None:
            return
        for effect in self.state.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case AnswerPush(call, outcome):
                self.repetitions.answered(call, outcome)
                self._calls.answer(call, effect)
            case AnswerPull(call):
                self._calls.answer(call, effect)
            case Refuse(call, refusal, reason):
                self.repetitions.answered(call, None)
                self._calls.answer(call, _REFUSALS[refusal](reason))
            case DropBuffer(buffer):
                self.buffers.pop(buffer, None)
                self.times.dropped(buffer)
            case DropVersion(version):
                dropped = self.versions.pop(version, None)
                if dropped is not None and self.state.backup:  # which nobody reads
                    self._maker.reuse(dropped.tensors)
            case Build():
                self._building = True
                reach("step.after_decide", self.state.version)
                contributions = [self.buffers[buffer] for buffer in effect.buffers]
                self.times.decided(self.state.version, dict(zip(effect.buffers, contributions, strict=True)))
                if self.trace.recorder.on:
                    self.trace.decided(self.state.version, effect.buffers, contributions)
                draft = self.drafting.take(contributions)
                task = asyncio.get_running_loop().create_task(self._build(effect, contributions, draft))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _build(self, effect: Build, contributions: Sequence[Contribution], draft: Draft | None) -> None:
        base, trace = self.versions[self.state.version], self.trace
        try:
            content = (draft.content if draft is not None else None) or self.copies.content(base.number)
            header = self.copies.header(contributions)
            if content is not None:
                await content.free()
            given = await self._maker.given(self.state.timeline, base, contributions, content)
            slot = self.sharing.take()
            shared = partial(self.sharing.space, slot) if slot is not None else None
            version, placed = await self._maker.make(base, contributions, given, shared, draft, content)
            self.sharing.settle(version, slot, base, placed)
            self.times.applied()
            if header is not None:
                assert content is not None, "it has the same condition as the header"
                assert not contributions[0].combined, "a shard has backups when it is none itself"
                began = trace.recorder.now() if trace.recorder.on else 0
                await self.copies.hold(header, content)
                if began:
                    trace.held(base.number, began)
            reach("commit.before_log", base.number)
            began = trace.recorder.now() if trace.recorder.on else 0
            self._publish(version, effect.buffers)
            if began:
                trace.published(base.number, began)
            reach("commit.after_log_before_reply", base.number)
        except Exception as error:  # the top of a task: a shard that cannot apply must not go on silently
            if self._calls.ended is not None:
                return
            log.exception("could not apply", version=base.number)
            self._failed(f"could not apply step {base.number}: {error}")

    def _publish(self, version: Version, buffers: Sequence[int]) -> None:
        self.versions[version.number] = version
        self.stealing.begin(version.number, time.monotonic())
        self.times.published()
        if self.state.pulls and self.state.consistency.mode is Mode.ASYNC:
            self.times.slowest(self.state.pulls.slowest_workers(), self.state.pulls.floor)
        for buffer in buffers:
            self.buffers.pop(buffer, None)
        self._building = False
        self.state_copies.published(version.number)  # before the next step can change the state
        if self.state.consistency.mode is Mode.ASYNC and not self.state.backup:
            self.holding.look(version.number)
        self.drafting.opened(version)
        if self._calls.ended is None:
            effects = self.state.handle(Built(version.number))
            self.copies.backups.between()
            for effect in effects:
                self._perform(effect)
            self.copies.published()
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)
        # At once: the next step must not have changed the state yet.
        if self.saver is not None and self.state.consistency.mode is Mode.SYNC and not self.state.backup:
            asked = self.saver.asked_for(version.number)
            if asked or self.saver.due(version.number):
                self.copy(version)

    async def arithmetic(self, work: Callable[[], T]) -> T:
        """Compute with the shard's tensors, see `ArithmeticThread`."""
        return await self.thread(work)

    # ---- the end

    def end(self, error: errors.ParamServerError) -> None:
        """Refuse all calls with ``error``, those that wait and those that come; nothing happens here any more."""
        self._calls.end(error)
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)
        self.holding.forget()

    async def close(self) -> None:
        """Stop all tasks, after :meth:`end`."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.saver is not None:
            await self.saver.close()
        await self.copies.close()
        await self.drafting.close()
        await self.norms.close()
        self.sharing.close()
