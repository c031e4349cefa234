"""A backup's state machine: it makes its primary's versions and counts the same, whatever is late or repeated."""

from __future__ import annotations

import random

import pytest

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPush,
    Arrived,
    AtClock,
    Build,
    Built,
    DropVersion,
    Effect,
    Forwarded,
    MembersChanged,
    Outcome,
    Promoted,
    PullAsked,
    Refusal,
    Refuse,
)
from paramserver.core.versions.names import AsyncName, Name, SyncName

SYNC, ASYNC = Consistency(Mode.SYNC), Consistency(Mode.ASYNC, 1)
WORKERS = frozenset({1, 2})


def shard(setting: Consistency, backup: bool = False) -> ShardState:
    state = ShardState(setting, WORKERS, backup=backup)
    assert state.handle(Activated(0)) == []
    return state


def leads(state: ShardState) -> bool:
    return not state.backup


class Pair:
    """A primary and its backup, with all that is on its way between them."""

    def __init__(self, setting: Consistency) -> None:
        self.primary, self.backup = shard(setting), shard(setting, backup=True)
        self.sent: list[Forwarded] = []
        self.calls = 0

    def push(self, state: ShardState, name: Name, worker: int, clock: int = 0) -> list[Effect]:
        self.calls += 1
        return state.handle(Arrived(self.calls, name, 1000 + self.calls, worker, 0, clock))

    def decides(self, effects: list[Effect]) -> list[Build]:
        """The primary sends its backup what a version is made of."""
        builds = [effect for effect in effects if isinstance(effect, Build)]
        for build in builds:
            self.calls += 1
            state = self.primary
            clocks = state.clocks_then()
            self.sent.append(
                Forwarded(build.version - 1, self.calls, state.parts(), state.consistency, clocks, state.pulls.floor)
            )
        return builds

    def arrives(self) -> list[Effect]:
        """The next message arrives at the backup."""
        return self.backup.handle(self.sent.pop(0))

    def same(self) -> None:
        """Both have counted the same, by the same workers."""
        assert self.backup.version == self.primary.version
        assert self.backup.counted() == self.primary.counted()
        assert self.backup.ledger.rows() == self.primary.ledger.rows()
        assert self.backup.counters.applied == self.primary.counters.applied
        assert self.backup.marks.of(self.backup.version) == self.primary.marks.of(self.primary.version)


def test_a_backup_makes_what_its_primary_has_decided() -> None:
    pair = Pair(SYNC)
    pair.push(pair.primary, SyncName(0, 0, 1, 2), 1)
    (build,) = pair.decides(pair.push(pair.primary, SyncName(0, 1, 2, 2), 2))
    assert [part.worker for part in pair.sent[0].parts] == [1, 2]
    (mine,) = pair.arrives()
    assert isinstance(mine, Build)
    assert (mine.version, mine.names, len(mine.buffers)) == (build.version, build.names, 1)
    pair.primary.handle(Built(1))
    pair.backup.handle(Built(1))
    pair.same()


def test_a_promoted_backup_first_makes_all_that_it_holds() -> None:
    pair = Pair(SYNC)
    for step in (0, 1):
        pair.decides(pair.push(pair.primary, SyncName(step, 0, 1, 1), 1))
        pair.primary.handle(Built(step + 1))
    (first,) = pair.arrives()
    assert pair.arrives() == [], "one version at a time"
    assert pair.backup.next_forwarded == 2
    assert pair.backup.handle(Promoted(SYNC)) == []
    assert not leads(pair.backup)
    assert isinstance(first, Build)
    dropped, second = pair.backup.handle(Built(1))
    assert dropped == DropVersion(0)
    assert isinstance(second, Build)
    assert pair.backup.handle(Built(2)) == []
    assert leads(pair.backup)
    pair.same()
    repeated, fresh = SyncName(1, 0, 1, 1), SyncName(2, 0, 1, 1)
    assert [e.outcome for e in pair.push(pair.backup, repeated, 2) if isinstance(e, AnswerPush)] == [Outcome.DUPLICATE]
    assert any(isinstance(effect, Build) for effect in pair.push(pair.backup, fresh, 2))


def test_a_backup_holds_two_versions_and_makes_no_third_one_beside_them() -> None:
    """The version before the newest has to stay until the primary decides: another shard's step may still be open."""
    pair = Pair(SYNC)
    for step in range(3):
        pair.decides(pair.push(pair.primary, SyncName(step, 0, 1, 1), 1))
        pair.primary.handle(Built(step + 1))
        effects = pair.arrives()
        assert effects[:-1] == [DropVersion(version) for version in [step - 1] if version >= 0]
        assert isinstance(effects[-1], Build)
        assert list(pair.backup.published.kept) == [step]
        pair.backup.handle(Built(step + 1))
        assert list(pair.backup.published.kept) == [step, step + 1]
    assert pair.primary.published.kept == (2, 3)


def test_the_clocks_of_the_primary_hold_workers_back_at_the_promoted_backup() -> None:
    pair = Pair(ASYNC)
    for worker in WORKERS:
        pair.primary.handle(PullAsked(worker, worker, AtClock(0), 0))
    for index in range(2):
        pair.decides(pair.push(pair.primary, AsyncName(0, index), 1, clock=index))
        pair.primary.handle(Built(index + 1))
        pair.arrives()
        pair.backup.handle(Built(index + 1))
    pair.backup.handle(Promoted(ASYNC))
    assert pair.backup.pulls.clocks == pair.primary.pulls.clocks == {1: 2, 2: 0}
    assert pair.backup.handle(PullAsked(9, 1, AtClock(2), 0)) == [], "worker 2 is two slices behind"
    pair.backup.handle(MembersChanged(5, frozenset({1})))
    assert len(pair.backup.pulls) == 0


def test_a_mode_that_the_backup_was_not_told_of_comes_with_the_version() -> None:
    pair = Pair(SYNC)
    after = Consistency(Mode.ASYNC, 1, revision=3, from_version=0)
    pair.backup.handle(Forwarded(0, 7, (), after))
    pair.backup.handle(Built(1))
    assert pair.backup.consistency == after
    pair.backup.handle(Promoted(after))
    assert any(isinstance(effect, Build) for effect in pair.push(pair.backup, AsyncName(0, 5), 1))


def test_a_setting_that_was_agreed_on_while_the_primary_died() -> None:
    pair = Pair(SYNC)
    agreed = Consistency(Mode.ASYNC, 1, revision=4, from_version=0)
    pair.backup.handle(Promoted(agreed))
    assert pair.backup.consistency == agreed
    refused = pair.push(pair.backup, SyncName(0, 0, 1, 1), 1)
    assert [e.refusal for e in refused if isinstance(e, Refuse)] == [Refusal.STALE]


@pytest.mark.parametrize("setting", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(100))
def test_random_schedules(setting: Consistency, seed: int) -> None:
    """Messages are late, versions take their time, the primary dies at some moment: nothing published is lost."""
    chance = random.Random(seed)
    pair = Pair(setting)
    # By version that the primary has decided: whether the backup holds what it is made of.
    building: int | None = None
    mine: int | None = None
    published = 0

    def next_name() -> Name:
        if setting is ASYNC:
            return AsyncName(0, chance.randrange(40))
        of = 2
        lo = chance.randrange(of)
        return SyncName(pair.primary.version, lo, lo + 1, of)

    def started(effects: list[Effect]) -> int | None:
        return next((effect.version for effect in effects if isinstance(effect, Build)), None)

    for _ in range(chance.randint(20, 120)):
        what = chance.choice(["push", "arrives", "made", "copied"])
        if what == "push":
            effects = pair.push(pair.primary, next_name(), chance.choice([1, 2]))
            building = started(effects) or building
            pair.decides(effects)
        elif what == "arrives" and pair.sent:
            mine = started(pair.arrives()) or mine
        elif what == "made" and building is not None and pair.backup.next_forwarded >= building:
            published = building  # the backup holds it
            effects = pair.primary.handle(Built(building))
            building = started(effects)
            pair.decides(effects)
        elif what == "copied" and mine is not None:
            mine = started(pair.backup.handle(Built(mine)))
        pair.primary.check_invariants()
        pair.backup.check_invariants()
    effects = pair.backup.handle(Promoted(setting))
    mine = started(effects) or mine
    while mine is not None:
        mine = started(pair.backup.handle(Built(mine)))
    assert not pair.backup.backup
    assert pair.backup.version >= published, f"seed {seed}"
    newest = pair.backup.version
    assert newest == 0 or newest - 1 in pair.backup.published.kept, "the step before may be open at other shards"
    rows = pair.primary.ledger.rows()
    assert pair.backup.ledger.rows()[: len(rows)] == rows, "in the same order"
