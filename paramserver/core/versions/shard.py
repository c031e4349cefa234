"""The state machine of one shard: which contributions count, and when a version is made; `Pulls` says who may have it.

It sees names, versions and buffer numbers, never tensors. The shell keeps the bytes of each contribution under a buffer
number, performs the effects, and reports with :class:`Built` when a version stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paramserver.core.versions.consistency import Batch, Consistency, History, Missing, Mode, Offer, Verdict, policies
from paramserver.core.versions.cuts import Cut, Marks
from paramserver.core.versions.events import (
    Activated,
    AnswerPush,
    Arrived,
    Build,
    Built,
    CallGone,
    ConsistencyAborted,
    ConsistencyCommitted,
    ConsistencyPrepared,
    CutAimed,
    CutBegun,
    CutEnded,
    DropBuffer,
    DropVersion,
    Effect,
    Event,
    Forwarded,
    Held,
    MembersChanged,
    Outcome,
    Part,
    PlanSettled,
    Promoted,
    PullAsked,
    Refusal,
    Refuse,
    StandsAt,
    WentIdle,
)
from paramserver.core.versions.ledger import Ledger, Row
from paramserver.core.versions.pulls import Pulls, Standing
from paramserver.core.versions.ranges import RangeSet

# A worker that was handed version t may still need it until all shards have published t + 1.
KEPT_VERSIONS = 2

_REFUSALS = {
    Verdict.OUT_OF_ORDER: Refusal.OUT_OF_ORDER,
    Verdict.STALE: Refusal.STALE,
    Verdict.MALFORMED: Refusal.MALFORMED,
}


@dataclass(slots=True)
class Counters:
    """Totals since the shard started, in slices."""

    applied: int = 0
    # Of them, slices that were counted before this shard began with a checkpoint.
    applied_before: int = 0
    duplicate: int = 0
    refused: int = 0


class ShardState:
    """One shard, at its primary or at a backup. All changes go through :meth:`handle`.

    A backup makes the versions that its primary has decided, and answers nobody until it is promoted.
    """

    def __init__(
        self, consistency: Consistency, workers: Iterable[int] = (), generation: int = 0, backup: bool = False
    ) -> None:
        self.consistency = consistency
        self.backup = backup
        self.generation = generation
        self.timeline = 0
        self.active = False
        self.counters = Counters()
        self._pulls = Pulls(workers)
        self._history = History()
        self._gate, self._combine = policies(consistency, self._history)
        self._scheduled: Consistency | None = None
        self._committed = False
        self._aborted_revision = 0
        self._building: Batch | None = None
        # Pushes that are answered once their contribution is in a version, by buffer, in order of arrival.
        self._waiting: dict[int, list[Arrived]] = {}
        self._versions: list[int] = []
        self._held_back = False
        # The version that nobody may have before a plan is settled; and the newest settled plan.
        self._stand: StandsAt | None = None
        self._settled_plan = 0
        # The cut that readers may be given, and the digests of versions.
        self.cut, self.marks = Cut(), Marks()
        self.ledger = Ledger()
        # By buffer, the worker of a contribution that is in no version yet.
        self._brought_by: dict[int, int] = {}
        # Of them, those that stand for slices that will never come.
        self._fillers: set[int] = set()
        # A backup: what the next versions are made of, the first of which may be in the making; whether it is promoted
        # as soon as these versions are made.
        self._forwarded: deque[Forwarded] = deque()
        self._promoted = False

    def restore(
        self,
        counted: Mapping[int, Iterable[tuple[int, int]]],
        applied: int,
        rows: Iterable[Row] = (),
        folded_steps: int = 0,
    ) -> None:
        """Begin with the contributions that were counted up to the version that is activated next."""
        self.ledger.restore(rows, folded_steps)
        assert not self.active, "a shard is restored before it is active"
        self._history.slices_done.update({e: RangeSet.from_ranges(ranges) for e, ranges in counted.items()})
        self.counters.applied = self.counters.applied_before = applied

    def begin_beside(
        self, consistency: Consistency, clocks: Mapping[int, int], floor: int, version: int, mark: bytes
    ) -> None:
        """A backup begins with ``version`` of its primary; see :class:`Forwarded` and `Marks`."""
        self.consistency = consistency
        self._gate, self._combine = policies(consistency, self._history)
        self._pulls.set_clocks(clocks, floor)
        self.marks.restore(version, mark)

    # ---- facts

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._history.version

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that may be asked for, oldest first."""
        return tuple(self._versions)

    @property
    def next_forwarded(self) -> int:
        """A backup: the version that the next message of the primary has to be about."""
        return self.version + len(self._forwarded)

    @property
    def parked(self) -> int:
        """How many pulls wait."""
        return len(self._pulls)

    @property
    def scheduled(self) -> Consistency | None:
        """A setting that is not in force yet."""
        return self._scheduled

    @property
    def committed(self) -> bool:
        """Whether the scheduled setting is agreed on."""
        return self._scheduled is not None and self._committed

    def counted(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Asynchronous slices in published versions: by epoch, half-open ranges."""
        return {epoch: done.ranges() for epoch, done in self._history.slices_done.items()}

    def stands(self, plan: int, version: int) -> bool:
        """Whether nobody gets ``version`` before this plan is settled."""
        return self._stand == StandsAt(plan, version)

    @property
    def at_stand(self) -> bool:
        """Whether workers wait for the newest version until a plan is settled."""
        return self._stand is not None and self.version >= self._stand.version

    @property
    def _given(self) -> int:
        """The newest version that anybody may have."""
        return self.version if self._stand is None else min(self.version, self._stand.version - 1)

    @property
    def min_clock(self) -> int:
        """The slowest clock of the workers at work; it never moves back."""
        return self._pulls.floor

    @property
    def clocks(self) -> Mapping[int, int]:
        """Asynchronous slices that each worker at work has finished."""
        return self._pulls.clocks

    @property
    def max_clock_spread(self) -> int:
        """How many slices a worker that was let go on was ahead of the slowest one, at most."""
        return self._pulls.max_spread

    def missing(self) -> Missing | None:
        """The slices that the next version lacks; None if it needs no particular ones."""
        return self._combine.missing()

    def holding_back(self) -> tuple[int, ...]:
        """The workers at the slowest clock."""
        return self._pulls.slowest_workers()

    # ---- the one door

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in; return the effects. A shard has no clock of its own."""
        match event:
            case Arrived():
                return self._arrived(event)
            case Forwarded():
                return self._taken_over(event)
            case Promoted(consistency):
                return self._promote(consistency)
            case PullAsked():
                return self._pull_asked(event)
            case CallGone(call):
                self._pulls.gone(call)
                return []
            case Built(version):
                return self._built(version)
            case WentIdle(worker):
                self._pulls.idle(worker)
                return self._advance()
            case Held(held):
                self._held_back = held
                return [] if held else self._advance()
            case MembersChanged(generation, workers):
                return self._members_changed(generation, workers)
            case CutBegun() | CutAimed() | CutEnded():
                return self._cut(event)
            case StandsAt(plan, version):
                ahead = version > self.version + (self._building is not None)
                if self.active and self._combine.per_step and ahead and plan > self._settled_plan:
                    self._stand = event
                return self._advance()
            case PlanSettled(plan):
                self._settled_plan = max(self._settled_plan, plan)
                if self._stand is not None and self._stand.plan <= plan:
                    self._stand = None
                return self._advance()
            case ConsistencyPrepared(consistency):
                if self.can_schedule(consistency):
                    self._scheduled, self._committed = consistency, False
                return self._build()
            case ConsistencyCommitted(revision, consistency):
                return self._committed_revision(revision, consistency)
            case ConsistencyAborted(revision):
                self._aborted_revision = max(self._aborted_revision, revision)
                if self._scheduled is not None and self._scheduled.revision <= revision and not self._committed:
                    self._scheduled = None
                return self._build()
            case Activated(timeline, version):
                return self._activated(timeline, version)

    # ---- contributions

    def _arrived(self, event: Arrived) -> list[Effect]:
        if stale := self._fence(event.timeline):
            return [DropBuffer(event.buffer), Refuse(event.call, Refusal.ROLLED_BACK, stale)]
        offer = self._combine.offer(event.name, event.buffer)
        if offer.verdict is Verdict.ACCEPTED:
            return self._accepted(event, offer)
        if offer.verdict is Verdict.QUEUED:
            self.counters.duplicate += event.name.slices
            self._waiting[offer.first].append(event)
            return [DropBuffer(event.buffer)]
        if offer.verdict is Verdict.DUPLICATE:
            self.counters.duplicate += event.name.slices
            self._pulls.tick(event.worker, event.clock)
            return [
                DropBuffer(event.buffer),
                AnswerPush(event.call, Outcome.DUPLICATE, self.version),
                *self._advance(),
            ]
        self.counters.refused += 1
        return [DropBuffer(event.buffer), Refuse(event.call, _REFUSALS[offer.verdict], offer.reason)]

    def _accepted(self, event: Arrived, offer: Offer) -> list[Effect]:
        effects: list[Effect] = [DropBuffer(buffer) for buffer in offer.dropped]
        for buffer in offer.dropped:
            self._brought_by.pop(buffer, None)
        self._brought_by[event.buffer] = event.worker
        if event.filler:
            self._fillers.add(event.buffer)
        if self._combine.per_step:
            effects.append(AnswerPush(event.call, Outcome.ACCEPTED, self.version))
        else:  # answered once it is in a version, so that the worker's next pull contains it
            self._waiting[event.buffer] = [event]
        return effects + self._build()

    # ---- what a primary tells its backups, and what a backup does with it

    def parts(self) -> tuple[Part, ...]:
        """The contributions of the version in the making."""
        batch = self._building
        if batch is None:
            return ()
        if self._forwarded:
            return self._forwarded[0].parts
        return tuple(
            Part(name, self._brought_by.get(buffer, 0), buffer in self._fillers)
            for name, buffer in zip(batch.names, batch.buffers, strict=True)
        )

    def clocks_then(self) -> dict[int, int]:
        """The clocks of the workers at work when the version in the making is published."""
        clocks = dict(self.clocks)
        for buffer in self._building.buffers if self._building is not None else ():
            for push in self._waiting.get(buffer, ()):
                if push.worker in clocks:
                    clocks[push.worker] = max(clocks[push.worker], push.clock + 1)
        return clocks

    def _taken_over(self, event: Forwarded) -> list[Effect]:
        assert self.backup, "only a backup is told what versions are made of"
        assert event.version == self.next_forwarded, (event.version, self.next_forwarded)
        self._forwarded.append(event)
        return self._build()

    def _promote(self, consistency: Consistency) -> list[Effect]:
        self._promoted = True
        if consistency.revision > self.consistency.revision:
            self._scheduled, self._committed = consistency, True
        return self._lead() + self._build()

    def _lead(self) -> list[Effect]:
        """Become the primary, if that is to be, and all versions are made that the former one has decided."""
        if not (self.backup and self._promoted and not self._forwarded):
            return []
        self.backup = False
        return self._take_into_force()

    def _follow(self, event: Forwarded) -> None:
        """The setting and the clocks of the primary, from the version on that was just made."""
        if event.consistency.revision > self.consistency.revision:
            before, self.consistency = self.consistency, event.consistency
            if before.mode is event.consistency.mode:
                self._gate, _ = policies(event.consistency, History())
            else:
                self._gate, self._combine = policies(event.consistency, self._history)
        self._pulls.set_clocks(event.clocks, event.floor)

    def _build(self) -> list[Effect]:
        if self._building is not None or (self._held() and not self.backup):
            return []
        batch: Batch | None = None
        if self._forwarded:
            first = self._forwarded[0]
            batch = Batch(tuple(part.name for part in first.parts), (first.buffer,))
        elif not self.backup:
            batch = self._combine.take(self.cut.only)
        if batch is None:
            return []
        self._building = batch
        # The primary of a synchronous shard has decided on contributions to the newest version, so all shards had
        # published that version, and nobody computes on an earlier one any more. In asynchronous mode nobody ever does.
        # So a backup has room for two versions only.
        spare = self._drop_old(1) if self.backup else []
        return [*spare, Build(self.version + 1, batch.names, batch.buffers)]

    def _built(self, version: int) -> list[Effect]:
        parts = self.parts()
        batch, self._building = self._building, None
        assert batch is not None, f"nobody asked for version {version}"
        assert version == self.version + 1, f"built {version} on top of {self.version}"
        self._history.version = version
        if self._forwarded:
            self._follow(event := self._forwarded.popleft())
            self._combine.followed([part.name for part in event.parts])
        else:
            self._combine.built()
        self._versions.append(version)
        self.counters.applied += sum(part.name.slices for part in parts if not part.filler)
        for buffer in batch.buffers:
            self._brought_by.pop(buffer, None)
        self._fillers.clear()
        self.cut.built(batch.names, version)
        self.marks.built(batch.names, version)
        self.ledger.note(batch.names, [part.worker for part in parts])
        effects: list[Effect] = self._lead()
        for buffer in batch.buffers:
            for push in self._waiting.pop(buffer, []):
                self._pulls.tick(push.worker, push.clock)
                outcome = Outcome.ACCEPTED if push.buffer == buffer else Outcome.DUPLICATE
                effects.append(AnswerPush(push.call, outcome, version))
        effects += self._take_into_force()
        effects += self._advance()
        return effects + self._drop_old() + self._build()

    def _drop_old(self, kept: int = KEPT_VERSIONS) -> list[Effect]:
        old = [version for version in self._versions[:-kept] if version != self.cut.kept]
        for version in old:
            self._versions.remove(version)
            self.marks.drop(version)
        return [DropVersion(version) for version in old]

    def _cut(self, event: CutBegun | CutAimed | CutEnded) -> list[Effect]:
        match event:
            case CutBegun(number):
                if not self._combine.per_step:
                    self.cut.begin(number)
            case CutAimed(number, missing):
                assert self._building is None, "a cut is aimed at when nothing is in the making"
                self.cut.aim(number, missing, self.version)
            case CutEnded(number):
                self.cut.end(number)
        return self._drop_old() + self._build()

    # ---- pulls

    def _pull_asked(self, event: PullAsked) -> list[Effect]:
        if stale := self._fence(event.timeline):
            return [Refuse(event.call, Refusal.ROLLED_BACK, stale)]
        return self._pulls.ask(event, self._gate is not None) or self._advance()

    def _advance(self) -> list[Effect]:
        """Move the slowest clock and answer every pull that may be answered now."""
        if not self.active:
            return self._pulls.answers(None)
        stands = Standing(self.version, self._given, self._versions, self.consistency, self._gate, self._held_back)
        return self._pulls.answers(stands)

    # ---- membership, mode, timeline

    def _members_changed(self, generation: int, workers: frozenset[int]) -> list[Effect]:
        if generation < self.generation:
            return []
        self.generation = generation
        return self._pulls.members_changed(workers, self._gate is not None) + self._advance()

    def _committed_revision(self, revision: int, consistency: Consistency | None) -> list[Effect]:
        settled = max(self.consistency.revision, self._aborted_revision)
        if consistency is not None and self._scheduled is None and revision > settled:
            self._scheduled = consistency
        if self._scheduled is None or self._scheduled.revision != revision:
            return []
        self._committed = True
        effects = self._take_into_force()
        return effects + self._advance() + self._build()

    def _held(self) -> bool:
        """The next version would cross a boundary that is not committed yet."""
        return self._scheduled is not None and not self._committed and self.version + 1 >= self._scheduled.from_version

    def can_schedule(self, consistency: Consistency) -> bool:
        """False if this shard is past the boundary, counting a version in the making.

        Out of synchronous mode the boundary lies ahead; into it, it is the present version with nothing queued.
        """
        settled = max(self.consistency.revision, self._aborted_revision)
        if consistency.revision <= settled or (self._scheduled is not None and self._committed):
            return False
        if self._combine.per_step:
            return consistency.from_version > self.version + (self._building is not None)
        return consistency.mode is Mode.ASYNC or (consistency.from_version == self.version and not self._waiting)

    def _take_into_force(self) -> list[Effect]:
        scheduled = self._scheduled
        if scheduled is None or not self._committed or scheduled.from_version > self.version:
            return []
        self._scheduled = None
        before, self.consistency = self.consistency, scheduled
        if before.mode is scheduled.mode:  # another bound: queued contributions stay queued
            self._gate, _ = policies(scheduled, History())
            return []
        self._pulls.set_clocks({})
        self.cut.end(self.cut.number)
        self._gate, self._combine = policies(scheduled, self._history)
        effects = self._drop_old()
        # Contributions that came while the boundary was held are in no version.
        for buffer, pushes in self._waiting.items():
            effects.append(DropBuffer(buffer))
            self._brought_by.pop(buffer, None)
            reason = f"the job changed to {scheduled} before {pushes[0].name} was applied"
            effects += [Refuse(push.call, Refusal.STALE, reason) for push in pushes]
        self._waiting.clear()
        return effects

    def _activated(self, timeline: int, version: int) -> list[Effect]:
        assert timeline > self.timeline or not self.active, "a timeline is activated once"
        self.timeline, self.active = timeline, True
        self._pulls.look_again()
        self._history.version = version
        self._history.steps_done = version
        self._versions = [version]
        return self._advance()

    def _fence(self, timeline: int) -> str:
        if timeline == self.timeline:
            return ""
        return (
            f"the message is of timeline {timeline}, this shard is on timeline {self.timeline}: refresh and try again"
        )

    # ---- for tests

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert not self.active or self._versions[-1] == self.version
        assert len(self._versions) <= KEPT_VERSIONS + (self.cut.kept is not None)
        self._pulls.check_invariants()
        assert self._history.steps_done <= self.version
        assert self._building is None or self.active, "a version is made before there is one"
        assert not self._combine.per_step or not self._waiting, "synchronous pushes are answered at once"
