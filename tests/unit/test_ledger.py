"""The ledger: what a shard keeps of what it has counted, and what follows for the samples of an epoch."""

from __future__ import annotations

import random

import pytest

from paramserver.core.versions.events import Part
from paramserver.core.versions.ledger import Account, Ledger, Row, ShardLedger, accounts
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.work.slices import DataSpec, SyncSchedule

DATA = DataSpec(samples=22, slice_size=4)  # six slices, the last of two samples
STEPS = SyncSchedule(DATA.slices_per_epoch, 4)  # steps of four and two slices


def sync(step: int, lo: int, hi: int, worker: int) -> Row:
    return step, lo, hi, len(STEPS.step(step).slices), worker


def noted(kept: int, batches: list[tuple[list[Name], list[int]]]) -> Ledger:
    ledger = Ledger(kept)
    for names, workers in batches:
        ledger.note([Part(name, worker) for name, worker in zip(names, workers, strict=True)])
    return ledger


def one(*shards: ShardLedger) -> Account:
    (account,) = accounts(shards, DATA, STEPS.step)
    return account


def test_two_steps_make_an_epoch() -> None:
    account = one(ShardLedger([sync(0, 0, 2, 1), sync(0, 2, 4, 2), sync(1, 0, 2, 1)]))
    assert (account.samples, account.once, account.twice, account.never) == (22, 22, 0, 0)
    assert account.complete
    assert account.workers == {1: 4, 2: 2}
    assert account.slices == {0: [1], 1: [1], 2: [2], 3: [2], 4: [1], 5: [1]}


def test_what_one_shard_lacks_has_not_counted() -> None:
    whole = ShardLedger([sync(0, 0, 4, 1), sync(1, 0, 2, 2)])
    account = one(whole, ShardLedger([sync(0, 0, 4, 1)]))
    assert (account.once, account.twice, account.never) == (16, 0, 6)
    assert not account.complete


def test_once_too_often_on_one_shard_is_seen() -> None:
    right = ShardLedger([sync(0, 0, 4, 1)])
    account = one(right, ShardLedger([sync(0, 0, 4, 1), sync(0, 1, 2, 2)]))
    assert (account.once, account.twice, account.never) == (12, 4, 6)
    assert account.slices[1] == [1, 2]


def test_asynchronous_slices() -> None:
    rows: list[Row] = [(0, 5, 6, 0, 3), (1, 0, 1, 0, 4)]
    first, second = accounts([ShardLedger(rows, 0, {0: [(0, 6)], 1: [(0, 1)]})], DATA, STEPS.step)
    assert (first.epoch, first.once, first.never) == (0, 22, 0)
    assert first.workers == {0: 5, 3: 1}  # who did the first five is no longer known
    assert (second.once, second.never, dict(second.workers)) == (4, 18, {4: 1})


def test_a_shard_keeps_the_last_details_and_forgets_whole_steps() -> None:
    batches: list[tuple[list[Name], list[int]]] = [
        ([SyncName(step, 0, 2, 4), SyncName(step, 2, 4, 4)], [1, 2]) for step in range(10)
    ]
    ledger = noted(7, batches)
    assert ledger.rows() == [(step, lo, lo + 2, 4, worker) for step in (7, 8, 9) for lo, worker in ((0, 1), (2, 2))]
    assert ledger.folded_steps == 7
    again = Ledger(7)
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
    assert accounts([ShardLedger(rows)], DATA, STEPS.step) == accounts([ShardLedger(mixed)], DATA, STEPS.step)


def test_slices_that_nobody_has_brought_cost_nothing() -> None:
    data = DataSpec(samples=10**15, slice_size=1)
    shard = ShardLedger([(0, 7, 8, 0, 1), (0, 10**17, 10**17 + 1, 0, 1)])
    (account,) = accounts([shard], data, lambda number: None)
    assert (account.samples, account.once, account.never) == (10**15, 1, 10**15 - 1)
