"""Shards that apply contributions in different orders make one cut for readers, whatever comes in between."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.counted import Run, Runs, of_one, united
from paramserver.core.versions.cuts import MOST_MISSING, Marks, lacking
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    Arrived,
    Build,
    Built,
    ConsistencyCommitted,
    ConsistencyPrepared,
    CutAimed,
    CutBegun,
    CutEnded,
    DropVersion,
    Event,
    Exactly,
    PullAsked,
    Refuse,
)
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.versions.ranges import RangeSet, minus

ASYNC = Consistency(Mode.ASYNC, None)


class Shard:
    """A shard whose versions take as long to make as the test likes."""

    def __init__(self) -> None:
        self.state = ShardState(ASYNC, (1,))
        self.making: Build | None = None
        self.holds: dict[int, frozenset[Name]] = {0: frozenset()}
        self.dropped: set[int] = set()
        self.answers: list[AnswerPull | Refuse] = []
        self._numbers = iter(range(1, 1_000_000))
        self.happen(Activated(0))

    def happen(self, event: Event) -> None:
        for effect in self.state.handle(event):
            match effect:
                case Build():
                    assert self.making is None
                    self.making = effect
                case DropVersion(version):
                    self.dropped.add(version)
                case AnswerPull() | Refuse():
                    self.answers.append(effect)
        self.state.check_invariants()

    def arrive(self, name: Name) -> None:
        number = next(self._numbers)
        self.happen(Arrived(number, name, number, 1, 0))

    def build(self) -> None:
        if self.making is not None:
            made, self.making = self.making, None
            self.holds[made.version] = self.holds[made.version - 1] | frozenset(made.names)
            self.happen(Built(made.version))

    def makes(self) -> bool:
        return self.making is not None

    def counted(self) -> Runs:
        return self.state.counted()

    def can_be_read(self, version: int) -> bool:
        self.happen(PullAsked(next(self._numbers), 0, Exactly(version), 0))
        return isinstance(self.answers.pop(), AnswerPull)


def names(*indices: int) -> list[AsyncName]:
    return [AsyncName(0, index) for index in indices]


@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_gives_one_cut(seed: int) -> None:
    numbers = random.Random(seed)
    shards = [Shard() for _ in range(numbers.randrange(2, 5))]
    work = names(*range(numbers.randrange(5, 40)))
    # By shard, what has not arrived there yet; the head arrives next.
    coming = [numbers.sample(work, len(work)) for _ in shards]
    waiting = set(range(len(shards)))
    counted: dict[int, Runs] = {}
    aimed: set[int] = set()
    begin = {index: numbers.randrange(60) for index in waiting}
    for now in range(10_000):
        index = numbers.randrange(len(shards))
        shard = shards[index]
        if numbers.random() < 0.5:
            shard.build()
        elif coming[index]:
            shard.arrive(coming[index].pop())
        if index in waiting and now >= begin[index]:
            waiting.remove(index)
            shard.happen(CutBegun(7))
        if index not in waiting and index not in counted and shard.making is None:
            counted[index] = shard.counted()
        if len(counted) == len(shards) and index not in aimed:
            aimed.add(index)
            missing = lacking(united([counted[i] for i in range(len(shards))]), shard.counted())
            assert missing is not None
            shard.happen(CutAimed(7, missing))
        if not any(coming) and not any(one.making for one in shards) and len(aimed) == len(shards):
            break
    else:
        pytest.fail("somebody still waits")
    kept = [shard.state.cut.kept for shard in shards]
    assert None not in kept
    cut = {shard.holds[version] for shard, version in zip(shards, kept, strict=True) if version is not None}
    assert len(cut) == 1, "all hold the same"
    assert len({one.state.marks.of(v) for one, v in zip(shards, kept, strict=True) if v is not None}) == 1
    for shard, version in zip(shards, kept, strict=True):
        assert version is not None
        assert shard.holds[shard.state.version] == frozenset(work), "what waited is applied afterwards"
        assert shard.can_be_read(version)
        shard.happen(CutEnded(7))
        assert shard.can_be_read(version) == (version >= shard.state.version - 1)


def test_nothing_is_applied_until_the_cut_is_aimed_at_and_nothing_else_until_it_is_made() -> None:
    shard = Shard()
    shard.happen(CutBegun(1))
    for name in names(0, 1, 2):
        shard.arrive(name)
    assert shard.making is None
    shard.happen(CutAimed(1, frozenset(names(1, 9))))
    shard.build()
    assert (shard.state.version, shard.making, shard.state.cut.kept) == (1, None, None)
    shard.arrive(AsyncName(0, 9))
    shard.build()
    assert shard.holds[2] == frozenset(names(1, 9))
    assert shard.state.cut.kept == 2
    for _ in range(2):
        shard.build()
    assert shard.state.version == 4, "and then the others"
    assert shard.can_be_read(2)


def test_a_cut_that_is_given_up_or_replaced_holds_nothing_up() -> None:
    shard = Shard()
    shard.happen(CutBegun(1))
    shard.arrive(AsyncName(0, 0))
    shard.happen(CutEnded(2))
    assert not shard.makes(), "another one was meant"
    shard.happen(CutEnded(1))
    shard.build()
    assert shard.state.version == 1
    shard.happen(CutAimed(1, frozenset(names(5))))
    shard.arrive(AsyncName(0, 1))
    assert shard.makes(), "too late"
    shard.build()
    shard.happen(CutBegun(2))
    shard.happen(CutAimed(1, frozenset()))
    assert shard.state.cut.kept is None
    shard.happen(CutBegun(3))
    shard.happen(CutAimed(3, frozenset()))
    assert shard.state.cut.kept == 2


def test_a_change_of_mode_ends_a_cut() -> None:
    shard = Shard()
    shard.happen(CutBegun(1))
    to_sync = Consistency(Mode.SYNC, None, revision=1, from_version=0)
    shard.happen(ConsistencyPrepared(to_sync))
    shard.happen(ConsistencyCommitted(1))
    assert shard.state.consistency.mode is Mode.SYNC
    assert shard.state.cut.only is None
    shard.happen(CutBegun(2))
    shard.arrive(SyncName(0, 0, 1, 1))
    shard.build()
    assert shard.state.version == 1, "a synchronous step is never held"


def test_marks_tell_sets_apart_and_not_orders() -> None:
    def mark(*order: int) -> bytes:
        marks = Marks()
        for version, name in enumerate(names(*order), 1):
            marks.built([name], version)
        return marks.of(len(order))

    assert mark(1, 2, 3) == mark(3, 1, 2)
    assert len({mark(1, 2), mark(1, 3), mark(2, 3), mark(1), mark()}) == 5


def ranges(*parts: tuple[int, int]) -> RangeSet:
    return RangeSet.from_ranges(parts)


@pytest.mark.parametrize(
    ("one", "other", "left"),
    [
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10)], [(0, 20)], []),
        ([(0, 10)], [], [(0, 10)]),
        ([], [(0, 10)], []),
        ([(5, 6), (10**15, 10**15 + 2)], [(5, 10**15)], [(10**15, 10**15 + 2)]),
    ],
)
def test_minus(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert list(minus(ranges(*one), ranges(*other)).ranges()) == left


def test_what_a_shard_lacks() -> None:
    target = united([of_one(0, [(0, 4)]), of_one(1, [(0, 1)])])
    assert lacking(target, of_one(0, [(0, 4)])) == frozenset({AsyncName(1, 0)})
    assert lacking(target, united([of_one(0, [(1, 3)]), of_one(1, [(0, 1)])])) == frozenset(names(0, 3))
    assert lacking(target, of_one(0, [(0, 5)])) is None, "it has more than that"
    assert lacking(target, of_one(2, [(0, 1)])) is None
    # Names are never counted out of numbers that somebody made up.
    assert lacking(of_one(0, [(0, MOST_MISSING + 1)]), ()) is None
    assert lacking(of_one(0, [(0, 10**18)]), ()) is None
    assert lacking((Run(0, 10**18, ((0, 1),)),), ()) is None
