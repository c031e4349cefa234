"""10^5 random schedules of asynchronous training, and proof that the campaign would notice if a rule were broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from paramserver.core.shards.published import Published
from paramserver.core.shards.pulls import Pulls
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Bounded, History, Offer, PerContribution, Policies, Verdict
from paramserver.core.versions.events import (
    AnswerPush,
    Arrived,
    Effect,
    Event,
    Joining,
    Outcome,
    PullAsked,
    WentIdle,
)
from paramserver.core.versions.names import AsyncName, Name
from paramserver.core.work.leases import SliceLeases
from tests.support.cluster.imagined import Tally
from tests.support.marks import long_but
from tests.support.schedules.schedules import Schedule

SCHEDULES, CASES = 100_000, 25
# So many cases with every `make test`, all of them with `make test-long`.
SHORT = 1
Log = Sequence[tuple[str, int, int, AsyncName | None]]


def play(seeds: range, trusting: bool = False) -> Tally:
    total = Tally()
    for seed in seeds:
        total.add(Schedule(seed, trusting=trusting).run())
    return total


@pytest.mark.parametrize("case", long_but(range(SHORT), range(CASES)))
def test_every_rule_holds_in_random_schedules(case: int) -> None:
    """D01, D02, D03, D13, D16: bound, own writes, freshness, all counted once, nobody stuck; 4000 schedules a case."""
    total = play(range(case, SCHEDULES, CASES))
    assert total.schedules == SCHEDULES // CASES
    happened = {
        "joins": (total.joins, 1600),
        "deaths": (total.deaths, 2000),
        "deaths between shards": (total.deaths_between_shards, 160),
        "taken for dead and back": (total.evictions, 1000),
        "idle": (total.idles, 3200),
        "parked pulls": (total.parked, 3200),
        "pulls of those who are no members": (total.fenced, 20),
        "messages that came twice": (total.repeated, 4000),
        "lost answers": (total.lost_answers, 3200),
        "duplicates": (total.duplicates, 4000),
        "duplicates of what is being applied": (total.duplicates_in_making, 320),
    }
    assert not {what: count for what, (count, least) in happened.items() if count < least}


def test_a_long_run_with_four_workers_keeps_the_bound() -> None:
    """D01: staleness 3, four workers, more than 2000 clocks each, random delays."""
    schedule = Schedule(1, staleness=3, workers=4, slices=8400, faults=False)
    tally = schedule.run()
    assert schedule.rules.spread == 3, "the bound was reached"
    assert tally.parked > 1000
    assert all(floor > 2000 for floor in schedule.rules.floors)


def test_unbounded_never_holds_anybody_back() -> None:
    """D05: with no bound, no pull of a member waits."""
    total, spread = Tally(), 0
    for seed in range(300):
        schedule = Schedule(seed, staleness=None, slices=12, faults=False)
        total.add(schedule.run())
        spread = max(spread, schedule.rules.spread)
    assert total.parked == 0
    assert spread > 3


@pytest.mark.parametrize("first", long_but([0], [0, 1500]))
@pytest.mark.parametrize("faults", [pytest.param(False, marks=pytest.mark.long), True])
def test_staleness_zero_is_the_schedule_of_the_barrier(faults: bool, first: int) -> None:
    """D04: nobody starts clock c + 1 before clock c of everybody at work is in, by nothing but the log of the run."""
    compared = 0
    for seed in range(first, first + 1500):
        schedule = Schedule(seed, staleness=0, faults=faults)
        schedule.run()
        compared += compare_with_barrier(schedule.log, schedule.replay)
    assert compared > 10_000


def compare_with_barrier(log: Log, replay: str) -> int:
    """Read the log from its beginning; returns how often somebody could have been too early."""
    at: dict[int, tuple[int, AsyncName | None]] = {}
    there: set[AsyncName | None] = set()
    compared = 0
    for what, worker, clock, name in log:
        if what == "in":
            there.add(name)
        elif what == "gone":
            at.pop(worker, None)
        else:
            at[worker] = clock, name
            for other, (its_clock, its_name) in at.items():
                finished = its_clock + (its_name in there)
                assert finished >= clock or other == worker, f"{worker} is at {clock}, {other} at {finished}: {replay}"
                compared += other != worker
    return compared


def test_a_seed_shows_the_same_run_again() -> None:
    first, second = Schedule(7), Schedule(7)
    assert first.run() == second.run()
    assert first.log == second.log


# ---- the campaign notices when a rule is broken


def gate_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bounded.admits
    monkeypatch.setattr(Bounded, "admits", lambda self, clock, slowest: right(self, clock - 1, slowest))


def gate_shut_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bounded.admits
    monkeypatch.setattr(
        Bounded, "admits", lambda self, clock, slowest: self.staleness is None or right(self, clock + 1, slowest)
    )


def no_check_for_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "has", lambda self, name: False)


def duplicates_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PerContribution.offer

    def offer(self: PerContribution, name: Name, buffer: int) -> Offer:
        offered = right(self, name, buffer)
        return Offer(Verdict.DUPLICATE) if offered.verdict is Verdict.QUEUED else offered

    monkeypatch.setattr(PerContribution, "offer", offer)


def answered_before_it_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def accepted(self: ShardState, event: Arrived, _: Offer) -> list[Effect]:
        return [AnswerPush(event.call, Outcome.ACCEPTED, self.version), *self._build()]

    monkeypatch.setattr(ShardState, "_accepted", accepted)


def the_dead_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pulls.members_changed

    def members_changed(self: Pulls, workers: frozenset[int], gated: bool) -> list[Effect]:
        return right(self, workers | self._members, gated)

    monkeypatch.setattr(Pulls, "members_changed", members_changed)


def the_idle_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ShardState.handle

    def handle(self: ShardState, event: Event) -> list[Effect]:
        return [] if isinstance(event, WentIdle) else right(self, event)

    monkeypatch.setattr(ShardState, "handle", handle)


def newcomers_start_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pulls._enter

    def enter(self: Pulls, pull: PullAsked, gated: bool) -> None:
        new = pull.worker in self._members and pull.worker not in self.clocks and isinstance(pull.want, Joining)
        right(self, pull, gated)
        if new:
            self._clocks.drop(pull.worker)
            self._clocks.raise_to(pull.worker, 0)

    monkeypatch.setattr(Pulls, "_enter", enter)


def clocks_count_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ShardState._accepted

    def accepted(self: ShardState, event: Arrived, offer: Offer) -> list[Effect]:
        self.pulls.tick(event.worker, event.clock)
        return right(self, event, offer)

    monkeypatch.setattr(ShardState, "_accepted", accepted)


def slices_of_the_dead_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SliceLeases, "give_back", lambda self, worker: [])


def nobody_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked pulls are answered when they come, or never."""
    right = Pulls.answers

    def answers(self: Pulls, published: Published, policies: Policies) -> list[Effect]:
        parked = dict(list(self._parked.items())[:-1])
        for call in parked:
            del self._parked[call]
        effects = right(self, published, policies)
        self._parked = parked | self._parked
        return effects

    monkeypatch.setattr(Pulls, "answers", answers)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (gate_off_by_one, "D0[13]"),
    (gate_shut_too_early, "D16"),
    (no_check_for_duplicates, "applied twice"),
    (duplicates_answered_at_once, "before it is applied"),
    (answered_before_it_is_applied, "before it is applied"),
    (the_dead_hold_back, "D16"),
    (the_idle_hold_back, "D16"),
    (newcomers_start_at_zero, "moved back"),
    (clocks_count_arrivals, "D03"),
    (slices_of_the_dead_are_lost, "D16"),
    (nobody_looks_again, "D16"),
]


@pytest.mark.parametrize(("mutant", "message"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_broken_core_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 schedules one fails, says what is wrong, and how to see it again."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=message) as caught:
        play(range(1000))
    assert any("replay with Schedule(" in note for note in caught.value.__notes__)


def test_a_newcomer_must_ask_all_shards_for_one_clock() -> None:
    """Shards may differ in their slowest clock: to begin at the furthest without asking the others breaks the bound.

    1. Worker 1 has applied a slice on shard 0, and not yet on shard 1.
    2. Worker 2 joins: shard 0 lets it in at clock 1, shard 1 at clock 0.
    3. Beginning at clock 1 it is ahead of worker 1, which staleness 0 forbids.
    """
    with pytest.raises(AssertionError, match=r"D0[13]"):
        play(range(1000), trusting=True)
