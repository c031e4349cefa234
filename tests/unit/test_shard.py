"""The state machine of a shard, event by event; lists of effects are compared whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paramserver.core.shards.published import KEPT_VERSIONS
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Missing, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    AtClock,
    AtLeast,
    Build,
    Built,
    CallGone,
    DropBuffer,
    DropVersion,
    Effect,
    Exactly,
    Joining,
    Latest,
    MembersChanged,
    Outcome,
    PlanSettled,
    PullAsked,
    Refusal,
    Refuse,
    StandsAt,
    Want,
    WentIdle,
)
from paramserver.core.versions.names import AsyncName, SyncName

ACCEPTED, DUPLICATE = Outcome.ACCEPTED, Outcome.DUPLICATE
TIMELINE = 1
Make = Callable[..., ShardState]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes active shards at version 0; what they are left in must not contradict itself."""
    made: list[ShardState] = []

    def make(mode: Mode, staleness: int | None = None, workers: tuple[int, ...] = (1, 2)) -> ShardState:
        state = ShardState(Consistency(mode, staleness), workers, generation=1)
        assert state.handle(Activated(TIMELINE)) == []
        made.append(state)
        return state

    yield make
    for state in made:
        state.check_invariants()


@pytest.fixture
def sync(make: Make) -> ShardState:
    """A synchronous shard at version 0 with workers 1 and 2."""
    return make(Mode.SYNC)


@pytest.fixture
def ssp(make: Make) -> ShardState:
    """An asynchronous shard at version 0 with workers 1 and 2, of which none has begun; the bound is 1."""
    return make(Mode.ASYNC, 1)


def node(call: int, step: int, lo: int, hi: int, of: int = 2, timeline: int = TIMELINE) -> Arrived:
    """A synchronous contribution; its buffer is the number of the call and a hundred."""
    return Arrived(call, SyncName(step, lo, hi, of), call + 100, worker=1, timeline=timeline)


def piece(call: int, index: int, worker: int = 1, clock: int = 0) -> Arrived:
    """An asynchronous contribution of epoch 0; its buffer is the number of the call and a hundred."""
    return Arrived(call, AsyncName(0, index), call + 100, worker, TIMELINE, clock)


def pull(call: int, want: Want, worker: int = 1) -> PullAsked:
    return PullAsked(call, worker, want, TIMELINE)


def reason(effects: list[Effect]) -> str:
    (refused,) = [effect for effect in effects if isinstance(effect, Refuse)]
    return refused.reason


def do_step(state: ShardState, version: int) -> None:
    """A whole step of a single slice."""
    state.handle(node(10 * version + 9, version, 0, 1, of=1))
    state.handle(Built(version + 1))


# ---- synchronous contributions


def test_a_step_is_made_of_all_its_slices_in_their_order(sync: ShardState) -> None:
    """1. Slice 1 arrives; 2. slice 0 arrives, the step is complete; 3. the version stands, the next step is open."""
    assert sync.handle(node(1, 0, 1, 2)) == [AnswerPush(1, ACCEPTED, 0)]
    assert str(sync.missing()) == "step 0: slices 0 of 2"
    assert sync.handle(node(2, 0, 0, 1)) == [
        AnswerPush(2, ACCEPTED, 0),
        Build(1, (SyncName(0, 0, 1, 2), SyncName(0, 1, 2, 2)), (102, 101)),
    ]
    assert (sync.version, sync.counters.applied, sync.missing()) == (0, 0, None)
    assert sync.handle(Built(1)) == []
    assert (sync.version, sync.counters.applied, sync.missing()) == (1, 2, Missing(1, (), 0))


def test_slice_computed_by_two_workers_counts_once(sync: ShardState) -> None:
    """Whoever is first counts: while the step is open, while it is being made, and once it is published."""
    sync.handle(node(1, 0, 0, 1))
    assert sync.handle(node(2, 0, 0, 1)) == [DropBuffer(102), AnswerPush(2, DUPLICATE, 0)]
    sync.handle(node(3, 0, 1, 2))
    assert sync.handle(node(4, 0, 1, 2)) == [DropBuffer(104), AnswerPush(4, DUPLICATE, 0)]
    sync.handle(Built(1))
    assert sync.handle(node(5, 0, 1, 2)) == [DropBuffer(105), AnswerPush(5, DUPLICATE, 1)]
    assert (sync.counters.applied, sync.counters.duplicate) == (2, 3)


def test_a_push_repeated_a_hundred_times_is_applied_once(sync: ShardState) -> None:
    """A03."""
    answers = [sync.handle(node(call, 0, 0, 1, of=1))[-1] for call in range(100)]
    assert answers[0] == Build(1, (SyncName(0, 0, 1, 1),), (100,))
    assert answers[1:] == [AnswerPush(call, DUPLICATE, 0) for call in range(1, 100)]


def test_a_duplicate_long_after_its_step_is_answered_as_old(sync: ShardState) -> None:
    """A06: a thousand steps later; nothing is kept for it but the number of the step."""
    for version in range(1000):
        do_step(sync, version)
    assert sync.handle(node(1, 3, 0, 1, of=1)) == [DropBuffer(101), AnswerPush(1, DUPLICATE, 1000)]


def test_a_contribution_from_the_future_is_refused(sync: ShardState) -> None:
    """A10: nothing of step 1 counts before version 1 is published; then the same message is welcome."""
    sync.handle(node(1, 0, 0, 1, of=1))
    early = sync.handle(node(2, 1, 0, 1, of=1))
    assert early == [DropBuffer(102), Refuse(2, Refusal.OUT_OF_ORDER, reason(early))]
    assert "still works on step 0" in reason(early)
    sync.handle(Built(1))
    assert sync.handle(node(3, 1, 0, 1, of=1)) == [
        AnswerPush(3, ACCEPTED, 1),
        Build(2, (SyncName(1, 0, 1, 1),), (103,)),
    ]
    sync.handle(Built(2))


@pytest.mark.parametrize("timeline", [TIMELINE - 1, TIMELINE + 1])
def test_another_timeline_is_fenced(sync: ShardState, timeline: int) -> None:
    """A push and a pull of an older (or an unheard-of) timeline change nothing."""
    effects = sync.handle(node(1, 0, 0, 1, timeline=timeline))
    assert effects == [DropBuffer(101), Refuse(1, Refusal.ROLLED_BACK, reason(effects))]
    effects = sync.handle(PullAsked(2, 1, Latest(), timeline))
    assert effects == [Refuse(2, Refusal.ROLLED_BACK, reason(effects))]
    assert sync.missing() == Missing(0, (), 0)


def test_a_larger_node_replaces_the_smaller_ones_inside_it(sync: ShardState) -> None:
    """1. Slice 0; 2. slices 0 to 1 from a worker that took over; 3. slice 1, late; 4. slices 2 to 3 complete it."""
    assert sync.handle(node(1, 0, 0, 1, of=4)) == [AnswerPush(1, ACCEPTED, 0)]
    assert sync.handle(node(2, 0, 0, 2, of=4)) == [DropBuffer(101), AnswerPush(2, ACCEPTED, 0)]
    assert sync.handle(node(3, 0, 1, 2, of=4)) == [DropBuffer(103), AnswerPush(3, DUPLICATE, 0)]
    assert sync.handle(node(4, 0, 2, 4, of=4)) == [
        AnswerPush(4, ACCEPTED, 0),
        Build(1, (SyncName(0, 0, 2, 4), SyncName(0, 2, 4, 4)), (102, 104)),
    ]
    sync.handle(Built(1))
    assert sync.counters.applied == 4


def test_a_node_whose_parts_are_all_there_is_a_duplicate(sync: ShardState) -> None:
    sync.handle(node(1, 0, 0, 1, of=4))
    sync.handle(node(2, 0, 1, 2, of=4))
    assert sync.handle(node(3, 0, 0, 2, of=4)) == [DropBuffer(103), AnswerPush(3, DUPLICATE, 0)]
    assert sync.counters.duplicate == 2, "counted in slices"


@pytest.mark.parametrize(
    ("arrived", "says"),
    [
        (node(2, 0, 1, 3, of=4), "no node of the reduction tree"),
        (node(2, 0, 2, 2, of=4), "no node of the reduction tree"),
        (node(2, 0, 3, 5, of=4), "no node of the reduction tree"),
        (node(2, 0, 0, 1, of=3), "has 3 slices, earlier ones said 4"),
    ],
)
def test_names_that_make_no_sense_change_nothing(sync: ShardState, arrived: Arrived, says: str) -> None:
    sync.handle(node(1, 0, 0, 1, of=4))
    before = sync.missing()
    effects = sync.handle(arrived)
    assert effects == [DropBuffer(102), Refuse(2, Refusal.MALFORMED, reason(effects))]
    assert says in reason(effects)
    assert (sync.missing(), sync.counters.refused) == (before, 1)


def test_an_asynchronous_contribution_is_refused_in_sync_mode(sync: ShardState) -> None:
    effects = sync.handle(piece(1, 0))
    assert effects == [DropBuffer(101), Refuse(1, Refusal.STALE, reason(effects))]


# ---- pulls


def test_a_pull_waits_for_its_version(sync: ShardState) -> None:
    """AtLeast and Exactly park until the version is published; Latest never waits."""
    assert sync.handle(pull(1, Latest(), worker=0)) == [AnswerPull(1, 0)]
    assert sync.handle(pull(2, AtLeast(0))) == [AnswerPull(2, 0)]
    assert sync.handle(pull(3, AtLeast(1))) == []
    assert sync.handle(pull(4, Exactly(1), worker=2)) == []
    assert sync.handle(pull(5, AtLeast(2))) == []
    assert len(sync.pulls) == 3
    sync.handle(node(6, 0, 0, 1, of=1))
    assert sync.handle(Built(1)) == [AnswerPull(3, 1), AnswerPull(4, 1)]
    assert len(sync.pulls) == 1


def test_the_last_versions_are_kept_and_older_ones_are_gone(sync: ShardState) -> None:
    assert KEPT_VERSIONS == 2
    do_step(sync, 0)
    assert sync.published.kept == (0, 1)
    assert sync.handle(pull(1, Exactly(0))) == [AnswerPull(1, 0)]
    sync.handle(node(2, 1, 0, 1, of=1))
    assert sync.handle(Built(2)) == [DropVersion(0)]
    assert sync.published.kept == (1, 2)
    effects = sync.handle(pull(3, Exactly(0)))
    assert effects == [Refuse(3, Refusal.GONE, "version 0 is dropped, the newest is 2")]
    assert sync.handle(pull(4, AtLeast(0))) == [AnswerPull(4, 2)]


def test_a_pull_whose_caller_went_away_is_forgotten(sync: ShardState) -> None:
    sync.handle(pull(1, AtLeast(1)))
    assert sync.handle(CallGone(1)) == []
    assert sync.handle(CallGone(1)) == []
    sync.handle(node(2, 0, 0, 1, of=1))
    assert sync.handle(Built(1)) == []


def test_nothing_is_answered_before_there_is_a_version() -> None:
    state = ShardState(Consistency(Mode.SYNC), (1,))
    assert state.handle(PullAsked(1, 1, Latest(), timeline=0)) == []
    assert state.handle(Activated(timeline=3, version=7)) == [AnswerPull(1, 7)]
    assert (state.version, state.published.kept, state.timeline) == (7, (7,), 3)
    late = Arrived(2, SyncName(6, 0, 1, 1), 102, worker=1, timeline=3)
    assert state.handle(late) == [DropBuffer(102), AnswerPush(2, DUPLICATE, 7)]
    state.check_invariants()


# ---- members


def test_who_is_member_no_more_is_told_so(sync: ShardState) -> None:
    """The parked pulls of the others stay; older news of members change nothing."""
    sync.handle(pull(1, AtLeast(1), worker=1))
    sync.handle(pull(2, AtLeast(1), worker=2))
    effects = sync.handle(MembersChanged(3, frozenset({2})))
    assert effects == [Refuse(1, Refusal.FENCED, "this worker is no longer a member: register again")]
    assert sync.handle(MembersChanged(2, frozenset())) == []
    assert (sync.generation, len(sync.pulls)) == (3, 1)


def test_a_late_push_of_somebody_given_up_counts_if_its_slice_is_open(sync: ShardState) -> None:
    """B02: late is not wrong."""
    sync.handle(MembersChanged(2, frozenset({2})))
    assert sync.handle(node(1, 0, 0, 1)) == [AnswerPush(1, ACCEPTED, 0)]


# ---- asynchronous contributions


def test_an_asynchronous_push_is_answered_once_it_is_applied(ssp: ShardState) -> None:
    """1. Slice 5 arrives and is worked on; 2. slice 3 arrives and waits; 3. each is answered with its own version."""
    assert ssp.handle(piece(1, 5)) == [Build(1, (AsyncName(0, 5),), (101,))]
    assert ssp.handle(piece(2, 3, worker=2)) == []
    assert ssp.handle(Built(1)) == [AnswerPush(1, ACCEPTED, 1), Build(2, (AsyncName(0, 3),), (102,))]
    assert ssp.handle(Built(2)) == [AnswerPush(2, ACCEPTED, 2), DropVersion(0)]
    assert (ssp.version, ssp.counters.applied, ssp.missing()) == (2, 2, None)


def test_a_push_repeated_while_the_first_is_applied_waits_with_it(ssp: ShardState) -> None:
    """A duplicate answered at once would let its worker pull a version without its own contribution.

    1. Slice 5 arrives and is worked on; its caller gives up. 2. The same push comes again, and from another worker.
    3. The version stands: all three are answered. 4. From now on a copy is answered at once.
    """
    ssp.handle(piece(1, 5))
    assert ssp.handle(piece(2, 5)) == [DropBuffer(102)]
    assert ssp.handle(piece(3, 5, worker=2)) == [DropBuffer(103)]
    assert ssp.handle(Built(1)) == [
        AnswerPush(1, ACCEPTED, 1),
        AnswerPush(2, DUPLICATE, 1),
        AnswerPush(3, DUPLICATE, 1),
    ]
    assert ssp.handle(piece(4, 5)) == [DropBuffer(104), AnswerPush(4, DUPLICATE, 1)]
    assert (ssp.counters.applied, ssp.counters.duplicate) == (1, 3)


def test_a_synchronous_contribution_is_refused_in_async_mode(ssp: ShardState) -> None:
    effects = ssp.handle(node(1, 0, 0, 1))
    assert effects == [DropBuffer(101), Refuse(1, Refusal.STALE, reason(effects))]


# ---- clocks


def work(state: ShardState, call: int, worker: int, clock: int) -> list[Effect]:
    """The worker finishes its slice of this clock; the effects of the version that it makes."""
    state.handle(piece(call, 100 * worker + clock, worker, clock))
    return [effect for effect in state.handle(Built(state.version + 1)) if not isinstance(effect, DropVersion)]


def test_the_fastest_waits_for_the_slowest(ssp: ShardState) -> None:
    """1. Both join; 2. worker 1 finishes clocks 0 and 1 and must wait; 3. worker 2 finishes clock 0, 1 goes on."""
    assert ssp.handle(pull(1, Joining(), worker=1)) == [AnswerPull(1, 0)]
    assert ssp.handle(pull(2, Joining(), worker=2)) == [AnswerPull(2, 0)]
    assert work(ssp, 3, worker=1, clock=0) == [AnswerPush(3, ACCEPTED, 1)]
    assert ssp.handle(pull(4, AtClock(1), worker=1)) == [AnswerPull(4, 1)]
    work(ssp, 5, worker=1, clock=1)
    assert ssp.handle(pull(6, AtClock(2), worker=1)) == []
    assert (ssp.pulls.slowest_workers(), len(ssp.pulls), ssp.pulls.clocks) == ((2,), 1, {1: 2, 2: 0})
    assert work(ssp, 7, worker=2, clock=0) == [AnswerPush(7, ACCEPTED, 3), AnswerPull(6, 3, min_clock=1)]
    assert ssp.pulls.max_spread == 1


def test_all_parked_pulls_within_the_new_minimum_are_answered(make: Make) -> None:
    """The slowest moves on and lets two others go; the one beyond the bound stays."""
    state = make(Mode.ASYNC, 1, (1, 2, 3, 4))
    state.handle(pull(1, Joining(), worker=1))
    assert state.handle(pull(2, AtClock(2), worker=2)) == []
    assert state.handle(pull(3, AtClock(2), worker=3)) == []
    assert state.handle(pull(4, AtClock(3), worker=4)) == []
    assert work(state, 5, worker=1, clock=0) == [
        AnswerPush(5, ACCEPTED, 1),
        AnswerPull(2, 1, min_clock=1),
        AnswerPull(3, 1, min_clock=1),
    ]
    assert len(state.pulls) == 1


def test_removing_the_slowest_lets_the_others_go(ssp: ShardState) -> None:
    ssp.handle(pull(1, Joining(), worker=1))
    assert ssp.handle(pull(2, AtClock(5), worker=2)) == []
    assert ssp.handle(MembersChanged(2, frozenset({2}))) == [AnswerPull(2, 0, min_clock=5)]


def test_who_has_nothing_to_do_holds_nobody_back(ssp: ShardState) -> None:
    """And begins again at the slowest clock when it comes back."""
    ssp.handle(pull(1, Joining(), worker=1))
    ssp.handle(pull(2, AtClock(5), worker=2))
    assert ssp.handle(WentIdle(1)) == [AnswerPull(2, 0, min_clock=5)]
    assert ssp.handle(WentIdle(1)) == []
    assert ssp.handle(pull(3, Joining(), worker=1)) == [AnswerPull(3, 0, min_clock=5)]
    assert ssp.pulls.clocks == {1: 5, 2: 5}


def test_a_pull_left_over_from_before_does_not_wake_the_idle(ssp: ShardState) -> None:
    """1. A pull of worker 2 is parked, its connection breaks; 2. worker 2 goes idle; 3. worker 1 works on alone."""
    ssp.handle(pull(1, Joining(), worker=1))
    ssp.handle(pull(2, AtClock(5), worker=2))
    assert ssp.handle(WentIdle(2)) == []
    work(ssp, 3, worker=1, clock=0)
    assert ssp.pulls.clocks == {1: 1}
    ssp.handle(CallGone(2))
    assert len(ssp.pulls) == 0


def test_a_newcomer_starts_at_the_slowest_clock_which_never_moves_back(make: Make) -> None:
    """Also when nobody is at work any more, and when the newcomer says that it has finished less."""
    state = make(Mode.ASYNC, 0, (1, 2, 3))
    assert state.handle(pull(1, AtClock(4), worker=1)) == [AnswerPull(1, 0, min_clock=4)]
    assert state.handle(pull(2, Joining(), worker=2)) == [AnswerPull(2, 0, min_clock=4)]
    state.handle(WentIdle(1))
    state.handle(WentIdle(2))
    assert (state.pulls.floor, state.pulls.clocks) == (4, {})
    assert state.handle(pull(3, AtClock(1), worker=3)) == [AnswerPull(3, 0, min_clock=4)]
    assert state.pulls.clocks == {3: 4}


def test_a_newcomer_waits_until_the_shard_has_heard_of_it(ssp: ShardState) -> None:
    assert ssp.handle(pull(1, Joining(), worker=3)) == []
    assert ssp.pulls.clocks == {}, "and holds nobody back meanwhile"
    assert ssp.handle(MembersChanged(2, frozenset({1, 2, 3}))) == [AnswerPull(1, 0)]
    assert ssp.pulls.clocks == {3: 0}


def test_newcomers_that_waited_enter_together(make: Make) -> None:
    """None is let through before the clocks of all are known: the bound holds among them as well."""
    state = make(Mode.ASYNC, 1, ())
    state.handle(pull(1, AtClock(9), worker=1))
    state.handle(pull(2, AtClock(5), worker=2))
    assert state.handle(MembersChanged(2, frozenset({1, 2}))) == [AnswerPull(2, 0, min_clock=5)]
    assert state.pulls.clocks == {1: 9, 2: 5}


def test_late_copies_do_not_move_clocks_back(ssp: ShardState) -> None:
    """A pull and a push of earlier clocks arrive once more."""
    ssp.handle(pull(1, Joining(), worker=1))
    work(ssp, 2, worker=1, clock=0)
    ssp.handle(pull(3, AtClock(1), worker=1))
    assert ssp.handle(pull(4, AtClock(0), worker=1)) == [AnswerPull(4, 1, min_clock=1)]
    assert ssp.handle(piece(5, 100, worker=1, clock=0)) == [DropBuffer(105), AnswerPush(5, DUPLICATE, 1)]
    assert ssp.pulls.clocks == {1: 1}


def test_a_slice_that_somebody_else_brought_counts_for_the_clock_all_the_same(ssp: ShardState) -> None:
    """D04: a duplicate is a finished slice."""
    ssp.handle(pull(1, Joining(), worker=1))
    ssp.handle(pull(2, Joining(), worker=2))
    ssp.handle(piece(3, 7, worker=2, clock=0))
    ssp.handle(Built(1))
    assert ssp.handle(piece(4, 7, worker=1, clock=0)) == [DropBuffer(104), AnswerPush(4, DUPLICATE, 1)]
    assert ssp.pulls.clocks == {1: 1, 2: 1}


def test_unbounded_lets_everybody_go(make: Make) -> None:
    state = make(Mode.ASYNC, None)
    state.handle(pull(1, Joining(), worker=1))
    assert state.handle(pull(2, AtClock(1000), worker=2)) == [AnswerPull(2, 0)]
    assert state.pulls.max_spread == 1000


def test_strangers_neither_hold_back_nor_are_let_in(ssp: ShardState) -> None:
    """A worker that was given up pulls and pushes under its former number; one that nobody has heard of yet waits."""
    ssp.handle(MembersChanged(2, frozenset({2})))
    no_member = "this worker is no longer a member: register again"
    assert ssp.handle(pull(1, AtClock(0), worker=1)) == [Refuse(1, Refusal.FENCED, no_member)]
    assert ssp.handle(pull(3, Joining(), worker=3)) == []
    assert work(ssp, 2, worker=1, clock=0) == [AnswerPush(2, ACCEPTED, 1)]
    assert ssp.pulls.clocks == {}


# ---- faults of the shell


def test_a_version_that_nobody_asked_for_is_a_fault_of_ours(sync: ShardState) -> None:
    with pytest.raises(AssertionError, match="nobody asked for version 1"):
        sync.handle(Built(1))


def test_a_timeline_is_activated_once(sync: ShardState) -> None:
    with pytest.raises(AssertionError, match="activated once"):
        sync.handle(Activated(TIMELINE))


# ---- another number of servers


def made(state: ShardState, step: int) -> list[Effect]:
    """Make the version after ``step`` out of one contribution."""
    state.handle(node(step + 50, step, 0, 2))
    return state.handle(Built(step + 1))


def test_nobody_gets_the_version_at_which_a_shard_stands(sync: ShardState) -> None:
    assert sync.handle(StandsAt(1, 2)) == []
    assert sync.published.stands(1, 2)
    sync.handle(pull(1, AtLeast(2)))
    sync.handle(pull(2, Exactly(2)))
    made(sync, 0)
    effects = made(sync, 1)
    assert not any(isinstance(effect, AnswerPull) for effect in effects)
    assert sync.published.at_stand
    assert sync.handle(pull(3, Latest())) == [AnswerPull(3, 1)]
    assert sync.handle(pull(4, AtLeast(0))) == [AnswerPull(4, 1)]
    assert sync.handle(PlanSettled(0)) == []
    assert sync.handle(PlanSettled(1)) == [AnswerPull(1, 2), AnswerPull(2, 2)]
    assert not sync.published.at_stand


def test_a_shard_stands_only_at_a_version_that_it_has_not_begun(sync: ShardState) -> None:
    sync.handle(node(1, 0, 0, 2))
    sync.handle(StandsAt(1, 1))
    assert not sync.published.stands(1, 1)
    sync.handle(StandsAt(1, 2))
    assert sync.published.stands(1, 2)
    sync.handle(Built(1))


def test_a_late_message_about_a_settled_plan_changes_nothing(sync: ShardState) -> None:
    sync.handle(PlanSettled(3))
    sync.handle(StandsAt(3, 5))
    assert not sync.published.stands(3, 5)
    sync.handle(StandsAt(4, 5))
    sync.handle(PlanSettled(3))
    assert sync.published.stands(4, 5)
