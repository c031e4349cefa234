"""The lease table of a coordinator that takes over: what the shards have counted is done, the rest goes out again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import pytest

from paramserver.core.versions.counted import Counted, Run
from paramserver.core.versions.names import AsyncName
from paramserver.core.versions.ranges import RangeSet, common, complement
from paramserver.core.work.leases import SliceLeases
from tests.support.schedules.leases import all_of, done_in, names


def restored(per_epoch: int, epoch: int, done: Mapping[int, Iterable[tuple[int, int]]]) -> SliceLeases:
    return SliceLeases.restored(per_epoch, epoch, Counted((e, 1, ranges) for e, ranges in sorted(done.items())).runs())


# ---- restored


def test_what_is_done_is_not_handed_out_and_all_else_is() -> None:
    leases = restored(5, 1, {1: [(0, 2), (4, 5)], 2: [(3, 4)]})
    assert leases.position() == (1, ((2, 4),))
    assert (done_in(leases, 0), done_in(leases, 1), done_in(leases, 2)) == (5, 3, 1)
    assert all_of(leases, 1, 2) == names(1, 2, 3) + names(2, 0, 1, 2, 4)
    assert leases.nothing_left(2)
    leases.complete(names(1, 2, 3) + names(2, 0, 1, 2, 4))
    assert leases.finished(2)
    assert all_of(leases, 1, 3) == names(3, 0, 1, 2, 3, 4)


def test_epochs_between_that_nobody_has_counted_are_there() -> None:
    leases = restored(2, 0, {2: [(0, 1)]})
    assert all_of(leases, 1, 2) == names(0, 0, 1) + names(1, 0, 1) + names(2, 1)


def test_epochs_before_the_first_are_forgotten() -> None:
    leases = restored(2, 3, {0: [(0, 1)], 3: [(1, 2)]})
    assert leases.position() == (3, ((0, 1),))
    assert all_of(leases, 1, 3) == names(3, 0)


def test_finished_epochs_cost_nothing_however_many_there_are() -> None:
    leases = SliceLeases.restored(2, 5, (Run(3, 10**15, ((0, 2),)), Run(3 + 10**15, 1, ((1, 2),))))
    assert leases.position() == (3 + 10**15, ((0, 1),))
    assert all_of(leases, 1, 3 + 10**15) == names(3 + 10**15, 0)


def test_nothing_counted_yet() -> None:
    leases = restored(3, 0, {})
    assert all_of(leases, 1, 0) == names(0, 0, 1, 2)


def test_without_a_data_set_only_new_names_are_handed_out() -> None:
    """What was out and never came cannot be done by anybody else."""
    leases = restored(0, 0, {0: [(0, 3), (5, 6)]})
    assert leases.lease(1, 0, 3, 1) == names(0, 6, 7, 8)
    assert done_in(leases, 0) == 4


def test_a_drain_waits_for_slices_that_came_back_only() -> None:
    """Nobody holds anything, and all that is not done may be counted on some shard: paused, it still goes out."""
    leases = restored(4, 0, {0: [(0, 2)]})
    leases.paused = True
    assert not leases.drained()
    assert all_of(leases, 1, 0) == names(0, 2, 3)
    leases.complete(names(0, 2, 3))
    assert leases.drained()


# ---- what workers say they hold


def test_a_worker_keeps_what_another_coordinator_leased_to_it() -> None:
    leases = restored(6, 0, {0: [(0, 1)]})
    assert not leases.reconcile(7, names(0, 1, 2))
    assert leases.holders(0) == {7: 2}
    assert all_of(leases, 8, 0) == names(0, 3, 4, 5)
    leases.complete(names(0, 1, 2, 3, 4, 5))
    assert leases.finished(0)


def test_what_a_worker_does_not_know_of_goes_back() -> None:
    """The answer that leased it was lost."""
    leases = SliceLeases(6)
    assert leases.lease(1, 0, 2, 1) == names(0, 0, 1)
    assert leases.reconcile(1, names(0, 0))
    assert leases.holders(0) == {1: 1}
    assert leases.lease(2, 0, 1, 1) == names(0, 1)
    assert not leases.reconcile(1, names(0, 0)), "a second time nothing comes back"


def test_what_somebody_else_holds_or_has_done_stays_so() -> None:
    leases = SliceLeases(4)
    leases.lease(1, 0, 2, 1)
    leases.complete(names(0, 0))
    assert not leases.reconcile(2, names(0, 0, 1))
    assert leases.holders(0) == {1: 1}
    assert done_in(leases, 0) == 1


def test_what_was_never_handed_out_is_not_taken_on_trust() -> None:
    leases = SliceLeases(4)
    assert not leases.reconcile(1, [*names(0, 3), *names(9, 0)])
    assert leases.holders(9) == {}
    assert all_of(leases, 2, 0) == names(0, 0, 1, 2, 3)


def test_others_are_not_touched() -> None:
    leases = SliceLeases(6)
    leases.lease(1, 0, 1, 1)
    leases.lease(2, 0, 1, 1)
    assert leases.reconcile(1, ())
    assert leases.holders(0) == {2: 1}


# ---- at random

SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_slice_is_done_once_although_coordinators_die_and_answers_get_lost(seed: int) -> None:
    """Workers lease, lose answers, finish and die; coordinators are replaced. Shards count; nothing is out for ever."""
    chance = random.Random(seed)
    per_epoch, epochs, workers = chance.randint(1, 9), chance.randint(1, 3), 3
    counted: list[set[AsyncName]] = [set(), set()]
    holds: dict[int, list[AsyncName]] = {worker: [] for worker in range(workers)}
    leases = SliceLeases(per_epoch)

    def take_over() -> SliceLeases:
        sets = [
            {e: RangeSet.from_ranges((n.index, n.index + 1) for n in shard if n.epoch == e) for e in range(epochs)}
            for shard in counted
        ]
        done = {e: common([shard[e] for shard in sets]).ranges() for e in range(epochs)}
        return restored(per_epoch, 0, done)

    def ask(worker: int, want: int) -> None:
        leases.reconcile(worker, holds[worker])
        granted = leases.lease(worker, epochs - 1, want, workers)
        if chance.random() > 0.3:  # else the answer is lost
            holds[worker].extend(granted)

    for _ in range(10_000):
        worker = chance.randrange(workers)
        match chance.choice(["lease", "lease", "work", "work", "half", "die", "replace"]):
            case "lease":
                ask(worker, chance.randint(1, 4))
            case "work" if holds[worker]:
                name = holds[worker].pop(0)
                for shard in counted:
                    shard.add(name)
                leases.complete([name])
            case "half" if holds[worker]:  # reaches one shard, and the worker dies
                counted[chance.randrange(2)].add(holds[worker][0])
                holds[worker].clear()
                leases.give_back(worker)
            case "die" if chance.random() < 0.2:
                holds[worker].clear()
                leases.give_back(worker)
            case "replace" if chance.random() < 0.2:
                leases = take_over()
        out = [name for held in holds.values() for name in held]
        both = counted[0] & counted[1]
        assert all(done_in(leases, e) <= sum(n.epoch == e for n in both) for e in range(leases.position()[0], epochs))
        if leases.finished(epochs - 1) and not out:
            break
    else:
        raise AssertionError(f"not finished (seed {seed})")
    assert both == {AsyncName(epoch, index) for epoch in range(epochs) for index in range(per_epoch)}


# ---- ranges


def test_the_complement_of_ranges() -> None:
    assert complement([], 3) == [(0, 3)]
    assert complement([(0, 3)], 3) == []
    assert complement([(1, 2), (4, 6)], 7) == [(0, 1), (2, 4), (6, 7)]
    assert complement([], 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_sets_have_in_common(seed: int) -> None:
    chance = random.Random(seed)
    plain = [set(chance.sample(range(20), chance.randint(0, 20))) for _ in range(chance.randint(1, 4))]
    sets = [RangeSet.from_ranges((n, n + 1) for n in one) for one in plain]
    found = {n for lo, hi in common(sets).ranges() for n in range(lo, hi)}
    assert found == set.intersection(*plain)
