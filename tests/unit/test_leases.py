"""Slice leases: every slice goes out until it is done, the oldest epoch first, in ever smaller portions."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import SliceLeases
from tests.support.schedules.leases import all_of, done_in, names

# ---- handing out


def test_portions_become_smaller_towards_the_end_of_an_epoch() -> None:
    """With two workers a quarter of what is left, at least one slice, and never more than wanted."""
    leases = SliceLeases(40)
    sizes = []
    while granted := leases.lease(1, 0, 8, 2):
        sizes.append(len(granted))
    assert sizes == [8, 8, 6, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert leases.nothing_left(0)
    assert not leases.finished(0)


def test_slices_come_in_order_and_one_epoch_after_the_other() -> None:
    leases = SliceLeases(3)
    assert leases.lease(1, 1, 1, 1) == names(0, 0)
    assert all_of(leases, 2, 0) == names(0, 1, 2)
    assert leases.lease(1, 0, 1, 1) == []
    assert all_of(leases, 1, 1) == names(1, 0, 1, 2)
    assert leases.lease(1, 1, 1, 1) == []


@pytest.mark.parametrize("want", [0, -1])
def test_who_wants_nothing_gets_nothing(want: int) -> None:
    assert SliceLeases(3).lease(1, 0, want, 1) == []


def test_without_a_data_set_names_never_end() -> None:
    leases = SliceLeases(0)
    assert leases.lease(1, 5, 3, 4) == names(0, 0, 1, 2)
    assert leases.give_back(1) == names(0, 0, 1, 2)
    leases.complete(names(0, 1))
    assert leases.lease(2, 0, 4, 4) == names(0, 0, 2, 3, 4)
    assert not leases.nothing_left(0)
    assert not leases.finished(0)
    assert leases.position() == (0, ())
    assert done_in(leases, 0) == 1


def test_a_negative_number_of_slices_is_refused() -> None:
    with pytest.raises(ValueError, match="slices_per_epoch must be 0 or more, not -1"):
        SliceLeases(-1)


# ---- coming back


def test_the_slices_of_a_worker_that_is_gone_come_first() -> None:
    leases = SliceLeases(100)
    leases.lease(1, 0, 4, 1)
    leases.lease(2, 0, 2, 1)
    leases.complete(names(0, 1))
    assert leases.give_back(1) == names(0, 0, 2, 3)
    assert leases.give_back(1) == []
    assert leases.holders(0) == {2: 2}
    assert leases.lease(3, 0, 2, 1) == names(0, 0, 2)
    assert leases.lease(3, 0, 3, 1) == names(0, 3, 6, 7)


def test_a_slice_that_is_done_after_all_is_not_handed_out_again() -> None:
    """1. Worker 1 is given up; 2. it was only away, and reports its slice; 3. nobody gets it any more."""
    leases = SliceLeases(4)
    leases.lease(1, 0, 1, 1)
    leases.lease(1, 0, 1, 1)
    leases.give_back(1)
    leases.complete(names(0, 0))
    assert all_of(leases, 2, 0) == names(0, 1, 2, 3)


def test_a_slice_done_by_its_former_holder_is_taken_from_the_present_one() -> None:
    leases = SliceLeases(1)
    leases.lease(1, 0, 1, 1)
    leases.give_back(1)
    leases.lease(2, 0, 1, 1)
    leases.complete(names(0, 0))
    assert leases.finished(0)
    assert leases.holders(0) == {}
    assert leases.give_back(2) == []
    assert leases.finished(0)


def test_completing_twice_changes_nothing() -> None:
    leases = SliceLeases(2)
    all_of(leases, 1, 0)
    leases.complete(names(0, 0))
    leases.complete(names(0, 0, 0))
    assert (done_in(leases, 0), leases.finished(0)) == (1, False)
    leases.complete(names(0, 1))
    leases.complete(names(0, 1))
    assert (done_in(leases, 0), leases.finished(0)) == (2, True)


@pytest.mark.parametrize("unknown", [AsyncName(0, 1), AsyncName(0, 2), AsyncName(0, 99), AsyncName(7, 0)])
def test_what_was_never_handed_out_cannot_be_done(unknown: AsyncName) -> None:
    """Otherwise a slice that does not exist would stand for one that is still to do."""
    leases = SliceLeases(2)
    leases.lease(1, 0, 1, 1)
    leases.complete([unknown, AsyncName(0, 0)])
    assert (done_in(leases, 0), leases.finished(0)) == (1, False)
    assert all_of(leases, 1, 0) == names(0, 1)


# ---- where the job stands


def test_the_position_is_what_is_not_done_of_the_oldest_epoch() -> None:
    leases = SliceLeases(4)
    assert leases.position() == (0, ((0, 4),))
    all_of(leases, 1, 1)
    leases.complete(names(0, 0, 2))
    assert leases.position() == (0, ((1, 2), (3, 4)))
    leases.complete(names(0, 1, 3))
    assert leases.position() == (1, ((0, 4),))
    assert (done_in(leases, 0), done_in(leases, 1)) == (4, 0)
    assert leases.finished(0)
    assert not leases.finished(1)


def test_a_job_goes_on_where_it_stood() -> None:
    leases = SliceLeases(5, epoch=3, done=[(0, 2), (3, 4)])
    assert leases.position() == (3, ((2, 3), (4, 5)))
    assert leases.finished(2)
    assert all_of(leases, 1, 3) == names(3, 2, 4)
    leases.complete(names(3, 2, 4))
    assert leases.position() == (4, ((0, 5),))


# ---- pausing


def test_paused_only_older_epochs_are_finished() -> None:
    """1. Epoch 1 is begun while epoch 0 is not finished; 2. paused; 3. epoch 0 is handed out again, epoch 1 not."""
    leases = SliceLeases(2)
    leases.lease(1, 0, 1, 1)
    leases.lease(1, 0, 1, 1)
    assert leases.lease(2, 1, 1, 1) == names(1, 0)
    leases.paused = True
    assert not leases.drained()
    leases.give_back(1)
    leases.complete(names(1, 0))
    assert not leases.drained(), "nobody holds anything, but epoch 0 has slices to hand out"
    assert all_of(leases, 2, 1) == names(0, 0, 1)
    assert not leases.drained()
    leases.complete(names(0, 0, 1))
    assert leases.drained()
    assert leases.position() == (1, ((1, 2),))
    leases.paused = False
    assert not leases.drained()
    assert all_of(leases, 2, 1) == names(1, 1)


def test_paused_before_anything_was_handed_out() -> None:
    leases = SliceLeases(2)
    leases.paused = True
    assert leases.lease(1, 0, 1, 1) == []
    assert leases.drained()


def test_paused_without_a_data_set() -> None:
    leases = SliceLeases(0)
    leases.lease(1, 0, 2, 1)
    leases.paused = True
    assert leases.lease(1, 0, 2, 1) == []
    assert not leases.drained()
    leases.complete(names(0, 0))
    leases.give_back(1)
    assert leases.drained()


# ---- as a whole


@pytest.mark.parametrize("seed", range(20))
def test_in_random_order_every_slice_is_done_once(seed: int) -> None:
    """Workers lease, finish, die; what is handed out is never done already, and never in two hands."""
    rng = random.Random(seed)
    leases = SliceLeases(rng.randint(1, 30))
    epochs = rng.randint(1, 3)
    held: dict[int, list[AsyncName]] = {worker: [] for worker in range(4)}
    done: set[AsyncName] = set()
    while not leases.finished(epochs - 1):
        worker = rng.randrange(4)
        match rng.randrange(8):
            case 0:
                assert leases.give_back(worker) == sorted(held[worker])
                held[worker] = []
            case 1 | 2 | 3:
                granted = leases.lease(worker, epochs - 1, rng.randint(1, 8), 4)
                assert not done & set(granted)
                assert not any(set(granted) & set(others) for others in held.values())
                held[worker] += granted
            case _ if held[worker]:
                name = held[worker].pop(rng.randrange(len(held[worker])))
                leases.complete([name])
                done.add(name)
        assert leases.holders(epochs) == {worker: len(slices) for worker, slices in held.items() if slices}
    assert done == {AsyncName(e, i) for e in range(epochs) for i in range(leases.slices_per_epoch)}


def size_of(value: object) -> int:
    """Bytes of an object and what it holds."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sys.getsizeof(value) + sum(size_of(item) for item in value)
    slots = [getattr(value, slot) for slot in getattr(value, "__slots__", ())]
    return sys.getsizeof(value) + sum(size_of(item) for item in [*slots, *getattr(value, "__dict__", {}).values()])


@pytest.mark.parametrize("slices_per_epoch", [0, 1000])
def test_memory_does_not_grow_with_what_is_done(slices_per_epoch: int) -> None:
    """10^5 slices, four workers that finish out of order, one of which dies every now and then."""
    rng = random.Random(3)
    leases = SliceLeases(slices_per_epoch)
    held: list[list[AsyncName]] = [[], [], [], []]
    finished, largest = 0, 0
    while finished < 100_000:
        for worker, slices in enumerate(held):
            if rng.random() < 0.01:
                leases.give_back(worker)
                slices.clear()
            slices.extend(leases.lease(worker, 10**9, 16 - len(slices), 4))
            rng.shuffle(slices)
            leases.complete(slices[:12])
            finished += len(slices[:12])
            del slices[:12]
        largest = max(largest, size_of(leases))
    assert largest < 50_000


def test_what_is_held_is_counted_whatever_becomes_of_it() -> None:
    """Leased, done, come back, said to be held: how many slices each worker holds is what a plain dictionary says."""
    table = SliceLeases(40)
    numbers = random.Random(3)
    holder: dict[AsyncName, int] = {}
    came_back: set[AsyncName] = set()
    for _ in range(400):
        worker = numbers.randrange(1, 5)
        held = [name for name, who in holder.items() if who == worker]
        match numbers.randrange(5):
            case 0 | 1:
                leased = table.lease(worker, 3, numbers.randrange(1, 9), 4)
                holder.update(dict.fromkeys(leased, worker))
                came_back -= {*leased}
            case 2:
                done = numbers.sample(sorted(holder), min(3, len(holder)))
                table.complete(done)
                for name in done:
                    del holder[name]
            case 3:
                said = [*held[1:], AsyncName(0, numbers.randrange(40))]
                table.reconcile(worker, said)
                lost = {*held} - {*said}
                for name in lost:
                    del holder[name]
                came_back |= lost
                holder.update(dict.fromkeys(came_back & {*said}, worker))
                came_back -= {*said}
            case _:
                assert table.give_back(worker) == sorted(held)
                for name in held:
                    del holder[name]
                came_back |= {*held}
        for epoch in range(4):
            assert table.holders(epoch) == Counter(who for name, who in holder.items() if name.epoch <= epoch)


@pytest.mark.parametrize("paused", [False, True])
def test_an_epoch_far_away_costs_nothing(paused: bool) -> None:
    """A request may name any epoch, and an epoch may have any number of slices."""
    table = SliceLeases(10**18)
    table.lease(1, 0, 1, 1)
    table.paused = paused
    found = table.lease(1, 2**64 - 1, 3, 1)
    assert found == ([] if paused else [AsyncName(0, 1), AsyncName(0, 2), AsyncName(0, 3)])
    assert not table.finished(2**64 - 1)
    assert not table.nothing_left(2**64 - 1)


def test_all_leased_and_paused() -> None:
    table = SliceLeases(2)
    for _ in range(2):
        assert table.lease(1, 2**64 - 1, 1, 1)
    table.paused = True
    assert table.lease(2, 2**64 - 1, 5, 1) == []
