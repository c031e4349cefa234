"""A shard changes its mode or its bound at a version boundary: prepared, then committed or aborted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    AtClock,
    AtLeast,
    Build,
    Built,
    ConsistencyAborted,
    ConsistencyCommitted,
    ConsistencyPrepared,
    DropBuffer,
    DropVersion,
    Effect,
    Joining,
    MembersChanged,
    Outcome,
    PullAsked,
    Refusal,
    Refuse,
    Want,
)
from paramserver.core.versions.names import AsyncName, Name, SyncName

ACCEPTED, DUPLICATE = Outcome.ACCEPTED, Outcome.DUPLICATE
TO_ASYNC = Consistency(Mode.ASYNC, 1, revision=1, from_version=1)
TO_SYNC = Consistency(Mode.SYNC, None, revision=1, from_version=0)


@pytest.fixture
def sync() -> Iterator[ShardState]:
    """A synchronous shard at version 0 with workers 1 and 2; a step has one slice."""
    state = ShardState(Consistency(Mode.SYNC), (1, 2))
    state.handle(Activated(0))
    yield state
    state.check_invariants()


@pytest.fixture
def ssp() -> Iterator[ShardState]:
    """An asynchronous shard at version 0 with workers 1 and 2; the bound is 1."""
    state = ShardState(Consistency(Mode.ASYNC, 1), (1, 2))
    state.handle(Activated(0))
    yield state
    state.check_invariants()


def push(call: int, name: Name, worker: int = 1, clock: int = 0) -> Arrived:
    """Its buffer is the number of the call and a hundred."""
    return Arrived(call, name, call + 100, worker, 0, clock)


def step(version: int) -> SyncName:
    return SyncName(version, 0, 1, 1)


def pull(call: int, want: Want, worker: int = 1) -> PullAsked:
    return PullAsked(call, worker, want, 0)


def build(version: int, name: Name, buffer: int) -> Build:
    return Build(version, (name,), (buffer,))


def without_reason(effects: list[Effect]) -> list[Effect]:
    return [replace(effect, reason="") if isinstance(effect, Refuse) else effect for effect in effects]


def scheduled(state: ShardState) -> Consistency | None:
    return state.changeover.scheduled


def do(state: ShardState, call: int, name: Name) -> None:
    """A whole version of one contribution."""
    state.handle(push(call, name))
    state.handle(Built(state.version + 1))


# ---- from synchronous to asynchronous


def test_the_boundary_is_held_until_it_is_committed(sync: ShardState) -> None:
    """1. Prepared; 2. the step before the boundary is complete and not made; 3. committed: it is made, and in force."""
    sync.handle(pull(1, AtLeast(1)))
    assert sync.handle(ConsistencyPrepared(TO_ASYNC)) == []
    assert scheduled(sync) == TO_ASYNC
    assert sync.handle(push(2, step(0))) == [AnswerPush(2, ACCEPTED, 0)]
    assert sync.handle(ConsistencyCommitted(1)) == [build(1, step(0), 102)]
    assert sync.consistency.mode is Mode.SYNC
    assert sync.handle(Built(1)) == [AnswerPull(1, 1)]
    assert (sync.consistency, scheduled(sync)) == (TO_ASYNC, None)
    assert sync.handle(push(3, AsyncName(0, 4))) == [build(2, AsyncName(0, 4), 103)]


def test_the_boundary_goes_on_in_the_old_mode_if_it_is_aborted(sync: ShardState) -> None:
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    sync.handle(push(1, step(0)))
    assert sync.handle(ConsistencyAborted(1)) == [build(1, step(0), 101)]
    assert sync.handle(Built(1)) == []
    assert (sync.consistency.mode, scheduled(sync)) == (Mode.SYNC, None)


def test_steps_before_the_boundary_are_not_held(sync: ShardState) -> None:
    later = replace(TO_ASYNC, from_version=2)
    sync.handle(ConsistencyPrepared(later))
    assert sync.handle(push(1, step(0))) == [AnswerPush(1, ACCEPTED, 0), build(1, step(0), 101)]
    sync.handle(Built(1))
    assert sync.handle(push(2, step(1))) == [AnswerPush(2, ACCEPTED, 1)]
    assert sync.handle(ConsistencyCommitted(1)) == [build(2, step(1), 102)]
    assert sync.handle(Built(2)) == [DropVersion(0)]
    assert sync.consistency == later


def test_a_boundary_in_the_past_cannot_be_prepared(sync: ShardState) -> None:
    """Nor one in the making: its version would be published before all shards have agreed."""
    do(sync, 1, step(0))
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    assert scheduled(sync) is None
    sync.handle(push(2, step(1)))
    sync.handle(ConsistencyPrepared(replace(TO_ASYNC, revision=2, from_version=2)))
    assert scheduled(sync) is None
    sync.handle(ConsistencyPrepared(replace(TO_ASYNC, revision=3, from_version=3)))
    assert scheduled(sync) is not None
    sync.handle(Built(2))


def test_a_late_synchronous_push_after_the_change(sync: ShardState) -> None:
    """D15: of a published step it is a duplicate; of a step that never was it is refused."""
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    sync.handle(ConsistencyCommitted(1))
    do(sync, 1, step(0))
    assert sync.handle(push(2, step(0))) == [DropBuffer(102), AnswerPush(2, DUPLICATE, 1)]
    assert without_reason(sync.handle(push(3, step(1)))) == [DropBuffer(103), Refuse(3, Refusal.STALE, "")]


# ---- from asynchronous to synchronous


def test_a_drained_shard_becomes_synchronous_at_once(ssp: ShardState) -> None:
    """Whoever asks for a clock is told to ask for a version; steps begin at the present version."""
    do(ssp, 1, AsyncName(0, 0))
    ssp.handle(pull(2, Joining(), worker=1))
    assert ssp.handle(pull(3, AtClock(5), worker=2)) == []
    assert ssp.handle(ConsistencyPrepared(replace(TO_SYNC, from_version=1))) == []
    assert without_reason(ssp.handle(ConsistencyCommitted(1))) == [Refuse(3, Refusal.STALE, "")]
    assert (ssp.consistency.mode, ssp.pulls.clocks) == (Mode.SYNC, {})
    assert without_reason(ssp.handle(pull(4, Joining()))) == [Refuse(4, Refusal.STALE, "")]
    assert ssp.handle(push(5, step(1))) == [AnswerPush(5, ACCEPTED, 1), build(2, step(1), 105)]
    ssp.handle(Built(2))


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_than_the_present_one_cannot_be_prepared(ssp: ShardState, version: int) -> None:
    do(ssp, 1, AsyncName(0, 0))
    ssp.handle(ConsistencyPrepared(replace(TO_SYNC, from_version=version)))
    assert scheduled(ssp) is None


def test_a_shard_with_work_in_hand_cannot_prepare(ssp: ShardState) -> None:
    """Its version would move beyond the boundary."""
    ssp.handle(push(1, AsyncName(0, 0)))
    ssp.handle(ConsistencyPrepared(TO_SYNC))
    assert scheduled(ssp) is None
    assert ssp.handle(Built(1)) == [AnswerPush(1, ACCEPTED, 1)]


def test_what_comes_between_prepare_and_commit_is_refused_and_forgotten(ssp: ShardState) -> None:
    """No bytes are kept and nobody waits for ever; the slice is not taken for done when asynchronous mode comes back.

    1. Prepared. 2. Somebody who was given up brings a slice, twice. 3. Committed: both calls are refused.
    4. Back to asynchronous mode: the slice counts.
    """
    ssp.handle(ConsistencyPrepared(TO_SYNC))
    assert ssp.handle(push(1, AsyncName(0, 7))) == []
    assert ssp.handle(push(2, AsyncName(0, 7))) == [DropBuffer(102)]
    assert without_reason(ssp.handle(ConsistencyCommitted(1))) == [
        DropBuffer(101),
        Refuse(1, Refusal.STALE, ""),
        Refuse(2, Refusal.STALE, ""),
    ]
    ssp.handle(ConsistencyPrepared(replace(TO_ASYNC, revision=2)))
    ssp.handle(ConsistencyCommitted(2))
    do(ssp, 3, step(0))
    assert ssp.handle(push(4, AsyncName(0, 7))) == [build(2, AsyncName(0, 7), 104)]
    ssp.handle(Built(2))


def test_what_comes_between_prepare_and_abort_is_applied(ssp: ShardState) -> None:
    ssp.handle(ConsistencyPrepared(TO_SYNC))
    assert ssp.handle(push(1, AsyncName(0, 7))) == []
    assert ssp.handle(ConsistencyAborted(1)) == [build(1, AsyncName(0, 7), 101)]
    assert ssp.handle(Built(1)) == [AnswerPush(1, ACCEPTED, 1)]


def test_no_change_of_mode_forgets_what_was_counted(ssp: ShardState) -> None:
    """An asynchronous slice is a duplicate in synchronous mode, and in asynchronous mode after it."""
    do(ssp, 1, AsyncName(0, 3))
    ssp.handle(ConsistencyPrepared(replace(TO_SYNC, from_version=1)))
    ssp.handle(ConsistencyCommitted(1))
    assert ssp.handle(push(2, AsyncName(0, 3))) == [DropBuffer(102), AnswerPush(2, DUPLICATE, 1)]
    ssp.handle(ConsistencyPrepared(replace(TO_ASYNC, revision=2, from_version=2)))
    ssp.handle(ConsistencyCommitted(2))
    do(ssp, 3, step(1))
    assert ssp.handle(push(4, AsyncName(0, 3))) == [DropBuffer(104), AnswerPush(4, DUPLICATE, 2)]


def test_a_stranger_that_waits_learns_of_the_mode_when_it_is_a_member(ssp: ShardState) -> None:
    ssp.handle(pull(1, Joining(), worker=3))
    ssp.handle(ConsistencyPrepared(TO_SYNC))
    assert ssp.handle(ConsistencyCommitted(1)) == []
    effects = ssp.handle(MembersChanged(1, frozenset({1, 2, 3})))
    assert without_reason(effects) == [Refuse(1, Refusal.STALE, "")]


# ---- another bound


def test_another_bound_lets_those_go_who_waited(ssp: ShardState) -> None:
    """What is queued stays queued, and clocks stay what they are."""
    looser = Consistency(Mode.ASYNC, 3, revision=1)
    ssp.handle(pull(1, Joining(), worker=1))
    assert ssp.handle(pull(2, AtClock(3), worker=2)) == []
    ssp.handle(push(3, AsyncName(0, 0)))
    ssp.handle(ConsistencyPrepared(looser))
    assert ssp.handle(push(4, AsyncName(0, 1), clock=1)) == []
    assert ssp.handle(ConsistencyCommitted(1)) == [AnswerPull(2, 0)]
    assert (ssp.consistency, ssp.pulls.clocks) == (looser, {1: 0, 2: 3})
    assert ssp.handle(Built(1)) == [AnswerPush(3, ACCEPTED, 1), build(2, AsyncName(0, 1), 104)]
    assert ssp.handle(Built(2)) == [AnswerPush(4, ACCEPTED, 2), DropVersion(0)]


def test_a_tighter_bound_counts_from_the_next_pull(ssp: ShardState) -> None:
    ssp.handle(pull(1, Joining(), worker=1))
    assert ssp.handle(pull(2, AtClock(1), worker=2)) == [AnswerPull(2, 0)]
    ssp.handle(ConsistencyPrepared(Consistency(Mode.ASYNC, 0, revision=1)))
    ssp.handle(ConsistencyCommitted(1))
    assert ssp.handle(pull(3, AtClock(1), worker=2)) == []


# ---- messages repeated, late, out of order


def test_repeated_messages_change_nothing(sync: ShardState) -> None:
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    sync.handle(ConsistencyCommitted(1))
    sync.handle(ConsistencyCommitted(1))
    sync.handle(ConsistencyAborted(1))
    sync.handle(ConsistencyPrepared(replace(TO_ASYNC, revision=2, from_version=5)))
    assert scheduled(sync) == TO_ASYNC, "what is committed stays"
    do(sync, 1, step(0))
    assert sync.consistency == TO_ASYNC
    assert sync.handle(ConsistencyCommitted(1)) == []
    assert sync.handle(ConsistencyPrepared(TO_ASYNC)) == []
    assert scheduled(sync) is None


def test_a_prepare_after_its_abort_holds_nothing(sync: ShardState) -> None:
    """The two overtook each other: nobody would ever commit it."""
    sync.handle(ConsistencyAborted(1))
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    assert scheduled(sync) is None
    assert sync.handle(push(1, step(0))) == [AnswerPush(1, ACCEPTED, 0), build(1, step(0), 101)]
    sync.handle(Built(1))


def test_an_abort_ends_older_settings_that_were_left_hanging(ssp: ShardState) -> None:
    """Whoever prepared revision 1 gave up without a word; revision 2 finds work in hand and is aborted."""
    ssp.handle(ConsistencyPrepared(TO_SYNC))
    ssp.handle(push(1, AsyncName(0, 0)))
    ssp.handle(ConsistencyPrepared(replace(TO_SYNC, revision=2)))
    assert scheduled(ssp) == TO_SYNC
    assert ssp.handle(ConsistencyAborted(2)) == [build(1, AsyncName(0, 0), 101)]
    ssp.handle(Built(1))


def test_a_newer_setting_replaces_one_that_is_only_prepared(sync: ShardState) -> None:
    """And a step that only the older one held is made."""
    sync.handle(ConsistencyPrepared(TO_ASYNC))
    sync.handle(push(1, step(0)))
    newer = replace(TO_ASYNC, revision=2, from_version=3)
    assert sync.handle(ConsistencyPrepared(newer)) == [build(1, step(0), 101)]
    assert sync.handle(ConsistencyCommitted(1)) == []
    assert sync.handle(ConsistencyAborted(1)) == []
    assert scheduled(sync) == newer
    sync.handle(Built(1))


def test_an_unknown_revision_commits_nothing(sync: ShardState) -> None:
    assert sync.handle(ConsistencyCommitted(9)) == []
    assert sync.consistency.mode is Mode.SYNC
