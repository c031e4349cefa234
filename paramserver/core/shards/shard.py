"""The state machine of one shard: which contributions count, and when a version is made; `Pulls` says who may have it.

It sees names, versions and buffer numbers, never tensors. The shell keeps the bytes of each contribution under a buffer
number, performs the effects, and reports with :class:`Built` when a version stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paramserver.core.shards.changeover import Changeover
from paramserver.core.shards.published import KEPT_VERSIONS, Published
from paramserver.core.shards.pulls import Pulls
from paramserver.core.shards.pushes import Pushes
from paramserver.core.versions.consistency import Batch, Consistency, History, Missing, Mode, Offer, Policies, Verdict
from paramserver.core.versions.counted import Counted, Runs
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
        self.backup = backup
        self.generation = generation
        self.timeline = 0
        self.active = False
        self.counters = Counters()
        self.pulls = Pulls(workers)
        self._pushes = Pushes()
        self._history = History()
        self._policies = Policies(consistency, self._history)
        self.changeover = Changeover()
        self._building: Batch | None = None
        self.published = Published()
        # The cut that readers may be given, and the digests of versions.
        self.cut, self.marks = Cut(), Marks()
        self.ledger = Ledger()
        # A backup: what the next versions are made of, the first of which may be in the making; whether it is promoted
        # as soon as these versions are made.
        self._forwarded: deque[Forwarded] = deque()
        self._promoted = False

    def restore(
        self,
        counted: Runs,
        applied: int,
        rows: Iterable[Row] = (),
        folded_steps: int = 0,
    ) -> None:
        """Begin with the contributions that were counted up to the version that is activated next."""
        self.ledger.restore(rows, folded_steps)
        assert not self.active, "a shard is restored before it is active"
        self._history.slices_done = Counted(counted)
        self.counters.applied = self.counters.applied_before = applied

    def begin_beside(
        self, consistency: Consistency, clocks: Mapping[int, int], floor: int, version: int, mark: bytes
    ) -> None:
        """A backup begins with ``version`` of its primary; see :class:`Forwarded` and `Marks`."""
        self._policies.begin(consistency)
        self.pulls.set_clocks(clocks, floor)
        self.marks.restore(version, mark)

    # ---- facts

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._history.version

    @property
    def consistency(self) -> Consistency:
        """The setting in force."""
        return self._policies.consistency

    @property
    def next_forwarded(self) -> int:
        """A backup: the version that the next message of the primary has to be about."""
        return self.version + len(self._forwarded)

    def counted(self) -> Runs:
        """Asynchronous slices in published versions."""
        return self._history.slices_done.runs()

    def missing(self) -> Missing | None:
        """The slices that the next version lacks; None if it needs no particular ones."""
        return self._policies.combine.missing()

    # ---- the one door

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in; return the effects. A shard has no clock of its own."""
        match event:
            case Arrived():
                return self._arrived(event)
            case PullAsked():
                return self._pull_asked(event)
            case Built(version):
                return self._built(version)
            case CallGone(call):
                self.pulls.gone(call)
                return []
            case Forwarded():
                return self._taken_over(event)
            case Promoted(consistency):
                return self._promote(consistency)
            case WentIdle(worker):
                self.pulls.idle(worker)
                return self._advance()
            case Held(held):
                self._policies.held_back = held
                return [] if held else self._advance()
            case MembersChanged(generation, workers):
                return self._members_changed(generation, workers)
            case CutBegun() | CutAimed() | CutEnded():
                return self._cut(event)
            case StandsAt(_, version):
                ahead = version > self.version + (self._building is not None)
                if self.active and self._policies.combine.per_step and ahead:
                    self.published.stand_at(event)
                return self._advance()
            case PlanSettled(plan):
                self.published.settle(plan)
                return self._advance()
            case ConsistencyPrepared(consistency):
                if self.can_schedule(consistency):
                    self.changeover.prepare(consistency)
                return self._build()
            case ConsistencyCommitted(revision, consistency):
                if not self.changeover.commit(revision, consistency, self.consistency.revision):
                    return []
                return self._take_into_force() + self._advance() + self._build()
            case ConsistencyAborted(revision):
                self.changeover.abort(revision)
                return self._build()
            case Activated(timeline, version):
                return self._activated(timeline, version)

    # ---- contributions

    def _arrived(self, event: Arrived) -> list[Effect]:
        if stale := self._fence(event.timeline):
            return [DropBuffer(event.buffer), Refuse(event.call, Refusal.ROLLED_BACK, stale)]
        offer = self._policies.combine.offer(event.name, event.buffer)
        if offer.verdict is Verdict.ACCEPTED:
            return self._accepted(event, offer)
        if offer.verdict is Verdict.QUEUED:
            self.counters.duplicate += event.name.slices
            self._pushes.repeat(event, offer.first)
            return [DropBuffer(event.buffer)]
        if offer.verdict is Verdict.DUPLICATE:
            self.counters.duplicate += event.name.slices
            self.pulls.tick(event.worker, event.clock)
            return [
                DropBuffer(event.buffer),
                AnswerPush(event.call, Outcome.DUPLICATE, self.version),
                *self._advance(),
            ]
        self.counters.refused += 1
        return [DropBuffer(event.buffer), Refuse(event.call, Refusal(offer.verdict.value), offer.reason)]

    def _accepted(self, event: Arrived, offer: Offer) -> list[Effect]:
        effects: list[Effect] = []
        for buffer in offer.dropped:
            self._pushes.forget(buffer)
            effects.append(DropBuffer(buffer))
        # An asynchronous push is answered once it is in a version, so that the worker's next pull contains it.
        self._pushes.accept(event, waits=not self._policies.combine.per_step)
        if self._policies.combine.per_step:
            effects.append(AnswerPush(event.call, Outcome.ACCEPTED, self.version))
        return effects + self._build()

    # ---- what a primary tells its backups, and what a backup does with it

    def parts(self) -> tuple[Part, ...]:
        """The contributions of the version in the making."""
        batch = self._building
        if batch is None:
            return ()
        if self._forwarded:
            return self._forwarded[0].parts
        brought = self._pushes.brought(batch.buffers)
        return tuple(Part(one.name, one.worker, one.filler) for one in brought)

    def clocks_then(self) -> dict[int, int]:
        """The clocks of the workers at work when the version in the making is published."""
        clocks = dict(self.pulls.clocks)
        for push in self._pushes.waiting_for(self._building.buffers if self._building is not None else ()):
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
            self.changeover.agree(consistency)
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
            self._policies.change(event.consistency)
        self.pulls.set_clocks(event.clocks, event.floor)

    def _build(self) -> list[Effect]:
        if self._building is not None:
            return []
        batch: Batch | None = None
        if self._forwarded:
            first = self._forwarded[0]
            batch = Batch(tuple(part.name for part in first.parts), (first.buffer,))
        elif not self.backup and not self.changeover.holds(self.version + 1):
            batch = self._policies.combine.take(self.cut.only)
        if batch is None:
            return []
        self._building = batch
        # The primary of a synchronous shard has decided on contributions to the newest version, so all shards had
        # published that version, and nobody computes on an earlier one any more. In asynchronous mode nobody ever does.
        # So a backup has room for two versions only.
        spare = self._drop_old(1) if self.backup else []
        return [*spare, Build(self.version + 1, batch.names, batch.buffers)]

    def _built(self, version: int) -> list[Effect]:
        batch, self._building = self._building, None
        assert batch is not None, f"nobody asked for version {version}"
        assert version == self.version + 1, f"built {version} on top of {self.version}"
        self._history.version = version
        brought: Sequence[Arrived | Part]
        if self._forwarded:
            self._follow(event := self._forwarded.popleft())
            self._policies.combine.followed(batch.names)
            brought = event.parts
        else:
            self._policies.combine.built()
            brought = self._pushes.brought(batch.buffers)
        self.published.add(version)
        self.cut.built(batch.names, version)
        self.marks.built(batch.names, version)
        self.ledger.note(brought)
        for one in brought:
            self.counters.applied += 0 if one.filler else one.name.slices
        effects: list[Effect] = self._lead()
        for push, outcome in self._pushes.published(batch.buffers):
            self.pulls.tick(push.worker, push.clock)
            effects.append(AnswerPush(push.call, outcome, version))
        effects += self._take_into_force()
        effects += self._advance()
        return effects + self._drop_old() + self._build()

    def _drop_old(self, kept: int = KEPT_VERSIONS) -> list[Effect]:
        old = self.published.drop_old(kept, self.cut.kept)
        for version in old:
            self.marks.drop(version)
        return [DropVersion(version) for version in old]

    def _cut(self, event: CutBegun | CutAimed | CutEnded) -> list[Effect]:
        match event:
            case CutBegun(number):
                if not self._policies.combine.per_step:
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
        return self.pulls.ask(event, self._policies.gate is not None) or self._advance()

    def _advance(self) -> list[Effect]:
        """Move the slowest clock and answer every pull that may be answered now."""
        return self.pulls.answers(self.published, self._policies)

    # ---- membership, mode, timeline

    def _members_changed(self, generation: int, workers: frozenset[int]) -> list[Effect]:
        if generation < self.generation:
            return []
        self.generation = generation
        return self.pulls.members_changed(workers, self._policies.gate is not None) + self._advance()

    def can_schedule(self, consistency: Consistency) -> bool:
        """False if this shard is past the boundary, counting a version in the making.

        Out of synchronous mode the boundary lies ahead; into it, it is the present version with nothing queued.
        """
        if not self.changeover.may_prepare(consistency, self.consistency.revision):
            return False
        if self._policies.combine.per_step:
            return consistency.from_version > self.version + (self._building is not None)
        return consistency.mode is Mode.ASYNC or (consistency.from_version == self.version and not self._pushes)

    def _take_into_force(self) -> list[Effect]:
        scheduled = self.changeover.take(self.version)
        if scheduled is None:
            return []
        if not self._policies.change(scheduled):
            return []
        self.pulls.set_clocks({})
        self.cut.end(self.cut.number)
        # Contributions that came while the boundary was held are in no version.
        return self._drop_old() + self._pushes.refuse(f"the job changed to {scheduled}")

    def _activated(self, timeline: int, version: int) -> list[Effect]:
        assert timeline > self.timeline or not self.active, "a timeline is activated once"
        self.timeline, self.active = timeline, True
        self.pulls.look_again()
        self._history.version = self._history.steps_done = version
        self.published.begin(version)
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
        assert not self.active or self.published.kept[-1] == self.version
        assert len(self.published.kept) <= KEPT_VERSIONS + (self.cut.kept is not None)
        self.pulls.check_invariants()
        assert self._history.steps_done <= self.version
        assert self._building is None or self.active, "a version is made before there is one"
        assert not self._policies.combine.per_step or not self._pushes, "synchronous pushes are answered at once"
