"""The ledger: what a shard keeps of what it has counted, and what follows for the samples of an epoch."""

from __future__ import annotations

import random

import pytest

from paramserver.core.versions.counted import Counted, Run
from paramserver.core.versions.events import Part
from paramserver.core.versions.ledger import Account, Accounts, Ledger, Row, ShardLedger
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.work.slices import DataSpec, SyncSchedule

DATA = DataSpec(samples=22, slice_size=4)  # six slices, the last of two samples
STEPS = SyncSchedule(DATA.slices_per_epoch, 4)  # steps of four and two slices


DATA_SAMPLES = (4, 4, 4, 4, 4, 2)


def sync(step: int, lo: int, hi: int, worker: int) -> Row:
    return step, lo, hi, len(STEPS.step(step).slices), worker


def noted(kept: int, batches: list[tuple[list[Name], list[int]]]) -> Ledger:
    ledger = Ledger(kept)
    for names, workers in batches:
        ledger.note([Part(name, worker) for name, worker in zip(names, workers, strict=True)])
    return ledger


def one(*shards: ShardLedger) -> Account:
    (account,) = Accounts(shards, DATA, STEPS).page()
    return account


def test_two_steps_make_an_epoch() -> None:
    account = one(ShardLedger([sync(0, 0, 2, 1), sync(0, 2, 4, 2), sync(1, 0, 2, 1)]))
    assert (account.samples, account.once, account.twice, account.never) == (22, 22, 0, 0)
    assert account.complete
    assert account.workers == {1: 4, 2: 2}
    assert account.slices == [(0, 2, [1]), (2, 4, [2]), (4, 6, [1])]


def test_what_one_shard_lacks_has_not_counted() -> None:
    whole = ShardLedger([sync(0, 0, 4, 1), sync(1, 0, 2, 2)])
    account = one(whole, ShardLedger([sync(0, 0, 4, 1)]))
    assert (account.once, account.twice, account.never) == (16, 0, 6)
    assert not account.complete


def test_once_too_often_on_one_shard_is_seen() -> None:
    right = ShardLedger([sync(0, 0, 4, 1)])
    account = one(right, ShardLedger([sync(0, 0, 4, 1), sync(0, 1, 2, 2)]))
    assert (account.once, account.twice, account.never) == (12, 4, 6)
    assert account.slices[1] == (1, 2, [1, 2])


def test_asynchronous_slices() -> None:
    rows: list[Row] = [(0, 5, 6, 0, 3), (1, 0, 1, 0, 4)]
    first, second = Accounts([ShardLedger(rows, 0, (Run(0, 1, ((0, 6),)), Run(1, 1, ((0, 1),))))], DATA, STEPS).page()
    assert (first.epoch, first.once, first.never) == (0, 22, 0)
    assert first.workers == {0: 5, 3: 1}  # who did the first five is no longer known
    assert (second.once, second.never, dict(second.workers)) == (4, 18, {4: 1})


def test_a_shard_keeps_the_last_details_and_forgets_whole_steps() -> None:
    batches: list[tuple[list[Name], list[int]]] = [
        ([SyncName(step, 0, 2, 4), SyncName(step, 2, 4, 4)], [1, 2]) for step in range(10)
    ]
    ledger = noted(14, batches)
    assert ledger.rows() == [(step, lo, lo + 2, 4, worker) for step in (7, 8, 9) for lo, worker in ((0, 1), (2, 2))]
    assert ledger.folded_steps == 7
    again = Ledger(14)
    again.restore(ledger.rows(), ledger.folded_steps)
    assert (again.rows(), again.folded_steps) == (ledger.rows(), 7)


def test_forgotten_steps_still_count() -> None:
    account = one(ShardLedger([sync(1, 0, 2, 2)], folded_steps=1))
    assert (account.once, account.twice, account.never) == (22, 0, 0)
    assert account.workers == {0: 4, 2: 2}


def test_asynchronous_details_are_bounded_too() -> None:
    ledger = noted(3, [([AsyncName(0, index)], [1]) for index in range(9)])
    assert [row[1] for row in ledger.rows()] == [6, 7, 8]
    assert ledger.folded_steps == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_arrival_gives_the_same_account(seed: int) -> None:
    chance = random.Random(seed)
    rows: list[Row] = [(epoch, index, index + 1, 0, chance.randint(1, 3)) for epoch in (0, 1) for index in range(6)]
    mixed = chance.sample(rows, len(rows))
    assert Accounts([ShardLedger(rows)], DATA, STEPS).page() == Accounts([ShardLedger(mixed)], DATA, STEPS).page()


def test_slices_that_nobody_has_brought_cost_nothing() -> None:
    data = DataSpec(samples=10**15, slice_size=1)
    shard = ShardLedger([(0, 7, 8, 0, 1), (0, 10**17, 10**17 + 1, 0, 1)])
    (account,) = Accounts([shard], data, SyncSchedule(data.slices_per_epoch, 1)).page()
    assert (account.samples, account.once, account.never) == (10**15, 1, 10**15 - 1)


def test_a_step_of_many_slices_is_bounded_too() -> None:
    ledger = noted(100, [([SyncName(step, 0, 64, 64)], [1]) for step in range(9)])
    assert (len(ledger.rows()), ledger.folded_steps) == (1, 8)


# ---- the whole life of a job


@pytest.mark.parametrize("seed", range(40))
def test_a_job_that_changes_its_mode_counts_each_slice_once(seed: int) -> None:
    """Steps before the present synchronous ones had other slices than the present schedule says."""
    chance = random.Random(seed)
    schedule, version, done = STEPS, 0, Counted()
    ledgers, kept = [Ledger(chance.choice([1, 9, 10_000]))] * 2, Counted()
    slices: list[tuple[int, int]] = []
    for _ in range(chance.randrange(1, 5)):
        for version in range(schedule.base_version, schedule.base_version + chance.randrange(9)):
            step = schedule.step(version)
            ledgers[0].note([Part(SyncName(version, 0, len(step.slices), len(step.slices)), 1)])
            slices += [(step.epoch, index) for index in step.slices]
            version += 1
        epoch, left = schedule.position(version := max(version, schedule.base_version))
        for _ in range(chance.randrange(30)):
            if not left:
                epoch, left = epoch + 1, ((0, DATA.slices_per_epoch),)
            index = left[0][0]
            left = tuple((max(lo, index + 1), hi) for lo, hi in left if hi > index + 1)
            ledgers[0].note([Part(AsyncName(epoch, index), 2)])
            done.add(epoch, index)
            slices.append((epoch, index))
            version += 1
        schedule = SyncSchedule(DATA.slices_per_epoch, 4, version, epoch if left else epoch + 1, left or None)
    shard = ShardLedger(ledgers[0].rows(), ledgers[0].folded_steps, done.runs())
    assert len(set(slices)) == len(slices), "the story is right"
    for epoch, index in sorted(slices):
        kept.add(epoch, index)
    found = Accounts([shard, shard], DATA, schedule)
    told = [Run(one.epoch, 1, tuple((lo, hi) for lo, hi, _ in one.slices)) for one in found.page()]
    assert Counted(told).runs() == kept.runs()
    assert (found.total.twice, found.total.once) == (0, sum(DATA_SAMPLES[index] for _, index in slices))
    # A shard that lacks an asynchronous slice is found, however old the slice is.
    if done.runs():
        gap = done.runs()[0]
        lacking = Counted([(gap.first, 1, gap.ranges[:-1]), *((f, e, r) for f, e, r in done.runs() if f > gap.first)])
        rows = [row for row in shard.rows if row[3]]
        short = ShardLedger(rows, shard.folded_steps, lacking.runs())
        if gap.epochs == 1:
            left_out = Accounts([shard, short], DATA, schedule)
            lost = sum(DATA_SAMPLES[index] for index in range(*gap.ranges[-1]))
            assert left_out.total.once == found.total.once - lost
