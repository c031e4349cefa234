"""The state machine of drafts: whole lists of effects, and random schedules."""

from __future__ import annotations

import random

import pytest

from paramserver.core.layout.thresholds import DRAFT_BYTES
from paramserver.core.versions.drafts import (
    Adopt,
    Begin,
    Begun,
    Came,
    Decided,
    DraftState,
    Effect,
    Event,
    Failed,
    Forget,
    Make,
    NotMade,
    Opened,
)
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.versions.reduction import cover

STEP, CHUNKS = 7, (3, 5)


class Shell:
    """A shard with two chunks, in step 7."""

    def __init__(self, nbytes: int = DRAFT_BYTES) -> None:
        self.state = DraftState(CHUNKS, nbytes)
        assert self.state.handle(Opened(STEP)) == []

    def tell(self, *events: Event) -> list[Effect]:
        """What follows from the last of them; nothing follows from the others."""
        *first, last = events
        for event in first:
            assert self.state.handle(event) == []
        return self.state.handle(last)


def half(part: int, lo: int, worker: int = 0, plain: bool = True, lacks: tuple[int, ...] = CHUNKS) -> Begun:
    """A contribution of one of two slices; each slice has a worker."""
    return Begun(part, SyncName(STEP, lo, lo + 1, 2), worker or lo + 1, frozenset(lacks), plain)


@pytest.fixture
def shell() -> Shell:
    return Shell()


def begin(shell: Shell) -> None:
    """Draft 1 of contributions 10 and 11."""
    assert shell.tell(half(11, 1), half(10, 0)) == [Begin(1, (10, 11))]


def test_a_chunk_is_made_when_all_have_brought_it_and_the_draft_becomes_the_version(shell: Shell) -> None:
    begin(shell)
    assert shell.tell(Came(10, 5), Came(10, 3), Came(11, 5)) == [Make(1, 5)]
    assert shell.tell(Came(11, 3)) == [Make(1, 3)]
    assert shell.tell(Decided([11, 10])) == [Adopt(1)]


def test_what_came_before_the_step_was_covered_counts(shell: Shell) -> None:
    assert shell.tell(half(10, 0), Came(10, 5), half(11, 1)) == [Begin(1, (10, 11))]
    assert shell.tell(Came(11, 5)) == [Make(1, 5)]


def test_chunks_that_no_contribution_changes_are_made_at_once(shell: Shell) -> None:
    assert shell.tell(half(10, 0, lacks=(3,)), half(11, 1, lacks=(3,))) == [Begin(1, (10, 11)), Make(1, 5)]


def test_a_step_of_which_everything_is_there_is_not_drafted(shell: Shell) -> None:
    shell.tell(half(10, 0, lacks=()), half(11, 1, lacks=()))
    assert shell.tell(Decided([10, 11])) == []


def test_a_larger_node_covers_its_slices(shell: Shell) -> None:
    whole = Begun(10, SyncName(STEP, 0, 5, 5), 1, frozenset({3}))
    assert shell.tell(whole) == [Begin(1, (10,)), Make(1, 5)]


@pytest.mark.parametrize(
    "other",
    [
        half(11, 1, plain=False),
        Begun(11, SyncName(STEP - 1, 1, 2, 2), 2, frozenset(CHUNKS)),
        Begun(11, SyncName(STEP + 1, 1, 2, 2), 2, frozenset(CHUNKS)),
        Begun(11, SyncName(STEP, 1, 3, 4), 2, frozenset(CHUNKS)),
        Begun(11, AsyncName(0, STEP), 2, frozenset(CHUNKS)),
    ],
    ids=["clipped", "an earlier step", "a later step", "no node", "asynchronous"],
)
def test_such_a_contribution_is_in_no_draft(other: Begun, shell: Shell) -> None:
    assert shell.tell(half(10, 0), other, Came(11, 5), Failed(11)) == []
    assert not shell.state.has(11)
    assert shell.tell(Decided([10, 11])) == []


def test_a_small_shard_is_not_drafted() -> None:
    assert Shell(DRAFT_BYTES - 1).tell(half(10, 0), half(11, 1), Decided([10, 11])) == []


def test_nothing_is_drafted_while_a_version_is_made(shell: Shell) -> None:
    begin(shell)
    assert shell.tell(Decided([10, 11])) == [Adopt(1)]
    assert shell.tell(half(12, 0), half(13, 1), Came(12, 5)) == []
    assert shell.tell(Opened(STEP), half(14, 0), half(15, 1)) == [Begin(2, (14, 15))]


def test_the_first_contribution_that_begins_is_in_the_draft(shell: Shell) -> None:
    """Its draft is forgotten if the slice of another worker counts."""
    begin(shell)
    assert shell.tell(half(12, 0, worker=9), Came(12, 5), Failed(12)) == []
    assert shell.tell(Decided([12, 11])) == [Forget(1)]


def test_a_worker_that_begins_anew_replaces_what_it_had_begun(shell: Shell) -> None:
    begin(shell)
    assert shell.tell(half(12, 1)) == [Forget(1), Begin(2, (10, 12))]
    assert shell.tell(Failed(11), Came(11, 5), Came(10, 5)) == []
    assert shell.tell(Came(12, 5)) == [Make(2, 5)]
    assert shell.tell(Decided([10, 12])) == [Adopt(2)]


def test_a_draft_is_forgotten_with_its_contribution_and_another_begins_with_the_next(shell: Shell) -> None:
    begin(shell)
    assert shell.tell(Came(11, 5), Failed(10)) == [Forget(1)]
    assert shell.tell(Came(10, 5), half(12, 0, worker=9)) == [Begin(2, (12, 11))]
    assert shell.tell(Came(12, 5)) == [Make(2, 5)]


def test_a_draft_whose_arithmetic_fails_is_forgotten_once(shell: Shell) -> None:
    begin(shell)
    assert shell.tell(NotMade(1)) == [Forget(1)]
    assert shell.tell(NotMade(1), Came(10, 5), Came(11, 5), Decided([10, 11])) == []


def test_the_arithmetic_of_a_former_draft_does_no_harm(shell: Shell) -> None:
    begin(shell)
    assert shell.tell(half(12, 1)) == [Forget(1), Begin(2, (10, 12))]
    assert shell.tell(NotMade(1), Decided([10, 12])) == [Adopt(2)]


# ---- random schedules


class Checked:
    """Performs the effects of one shard and checks each of them against the contributions themselves."""

    def __init__(self, chunks: int) -> None:
        self.state = DraftState(range(chunks), DRAFT_BYTES)
        self.chunks = chunks
        # Of each contribution that may be in a draft, the slices and the chunks that are still to come.
        self.names: dict[int, SyncName] = {}
        self.lacks: dict[int, set[int]] = {}
        self.draft, self.parts, self.made = 0, tuple[int, ...](), set[int]()
        self.adopted = 0

    def tell(self, event: Event) -> None:
        for effect in self.state.handle(event):
            match effect:
                case Begin(draft, parts):
                    assert draft > self.draft
                    self.draft, self.parts, self.made = draft, parts, set()
                    names = [self.names[part] for part in parts]
                    assert [s for name in names for s in range(name.lo, name.hi)] == list(range(names[0].of))
                case Make(draft, chunk):
                    assert self.parts
                    assert draft == self.draft
                    assert chunk not in self.made
                    assert all(chunk not in self.lacks[part] for part in self.parts)
                    self.made.add(chunk)
                case Adopt(draft):
                    assert isinstance(event, Decided)
                    assert draft == self.draft
                    assert set(event.parts) == set(self.parts)
                    assert len(self.made) == self.chunks, "all of it is there"
                    self.parts = ()
                    self.adopted += 1
                case Forget(draft):
                    assert self.parts
                    assert draft == self.draft
                    self.parts = ()
        ready = {chunk for chunk in range(self.chunks) if all(chunk not in self.lacks[part] for part in self.parts)}
        assert not self.parts or ready == self.made, "a chunk waits for nothing"


def random_steps(seed: int) -> int:
    """Some steps whose contributions come piece by piece, twice, from several workers, or not; how many were drafts."""
    chance = random.Random(seed)
    shard, numbers = Checked(chance.randint(1, 4)), iter(range(1, 10_000))
    for step in range(3):
        of = chance.randint(1, 6)
        shard.tell(Opened(step))
        shard.names.clear()
        shard.lacks.clear()
        whole: dict[Name, int] = {}  # the first that came
        wanted = [SyncName(step, lo, hi, of) for lo, hi in cover(0, of, of)]
        if chance.random() < 0.7:
            wanted = [SyncName(step, slice_, slice_ + 1, of) for slice_ in range(of)]
        arriving: dict[int, SyncName] = {}
        while len(whole) < len(wanted):
            part = chance.choice([0, 0, *arriving]) or next(numbers)
            if part not in arriving:
                name = chance.choice(wanted)
                used = chance.sample(range(shard.chunks), chance.randint(1, shard.chunks))
                arriving[part] = shard.names[part] = name
                shard.lacks[part] = set(used)
                shard.tell(Begun(part, name, chance.randint(1, 2), frozenset(used), chance.random() < 0.95))
            elif chance.random() < 0.05:
                del arriving[part]
                shard.tell(Failed(part))
            elif shard.lacks[part]:
                chunk = chance.choice(sorted(shard.lacks[part]))
                shard.lacks[part].remove(chunk)
                shard.tell(Came(part, chunk))
            else:
                whole.setdefault(arriving.pop(part), part)
        shard.tell(Decided(list(whole.values())))
        assert not shard.parts, "a draft is over when the version is decided"
    return shard.adopted


@pytest.mark.parametrize("part", range(2))
def test_random_schedules(part: int) -> None:
    assert sum(random_steps(seed) for seed in range(150 * part, 150 * (part + 1))) > 30


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_random_schedules(part: int) -> None:
    assert sum(random_steps(seed) for seed in range(5000 * part, 5000 * (part + 1))) > 1000
