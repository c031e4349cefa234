"""A job of a million steps: what its processes keep and answer costs no more than that of a young one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from paramserver.checkpoint.contents import runs_to_json
from paramserver.coordinator.leadership import journal as journal_module
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.watching.course import ALL_POINTS, MAX_POINTS, Course
from paramserver.coordinator.work.accounts import Accounting
from paramserver.coordinator.work.agreeing import Agreeing
from paramserver.core.procedures.checkpointing import Checkpointing, Copy, Part, Reported, Written
from paramserver.core.records.history import NAMES, POINTS, History
from paramserver.core.records.steps import StepValues
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import Activated, Arrived, Built
from paramserver.core.versions.ledger import KEPT, MOST_EPOCHS, Accounts, ShardLedger
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.work.slices import DataSpec, SyncSchedule
from paramserver.server.replicas.facts import ledger_of
from paramserver.store.memory import MemoryStore
from paramserver.v1 import coordinator_pb2
from paramserver.wire.messages import slices_from_proto

# Slices of an epoch, and those of a step.
EPOCH, STEP = 10, 2
DATA = DataSpec(samples=EPOCH * 4, slice_size=4)
SCHEDULE = SyncSchedule(EPOCH, STEP)
MODES = [Mode.SYNC, Mode.ASYNC]
YOUNG = 10_000
AGES = [20_000, pytest.param(1_000_000, marks=pytest.mark.long)]


def trained(steps: int, mode: Mode) -> ShardState:
    """A shard after so many steps of two slices, each by another worker."""
    shard = ShardState(Consistency(mode), (1, 2))
    shard.handle(Activated(1, 0))
    for number in range(steps * STEP):
        name: Name = (
            SyncName(number // STEP, number % STEP, number % STEP + 1, STEP)
            if mode is Mode.SYNC
            else AsyncName(*divmod(number, EPOCH))
        )
        for effect in shard.handle(Arrived(number, name, number, 1 + number % 2, 1)):
            if (version := getattr(effect, "version", None)) is not None and type(effect).__name__ == "Build":
                shard.handle(Built(version))
    return shard


def ledger(shard: ShardState) -> ShardLedger:
    return ShardLedger(shard.ledger.rows(), shard.ledger.folded_steps, shard.counted())


def calls(work: Callable[[], Any]) -> int:
    """How many functions ``work`` calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("steps", AGES)
@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_of_an_old_job_is_small(mode: Mode, steps: int) -> None:
    shard = trained(steps, mode)
    old, young = ledger(shard), ledger(trained(YOUNG, mode))
    found = Accounts([old, old], DATA, SCHEDULE)
    assert (found.total.once, found.total.twice, found.total.never) == (steps * STEP * 4, 0, 0)
    assert len(found.page()) == MOST_EPOCHS
    # The details of an epoch more, at both ends, and some steps of a search among numbers twenty times as large.
    assert calls(lambda: Accounts([old, old], DATA, SCHEDULE).page()) < 1.1 * calls(
        lambda: Accounts([young, young], DATA, SCHEDULE).page()
    )
    # A row is five numbers: of 8 bytes in a file, of at most 4 bytes in a message.
    assert len(old.rows) <= KEPT
    message = ledger_of(shard, {1: "worker-0", 2: "worker-1"})
    assert message.ByteSize() < KEPT * 5 * 4 + 1000
    assert slices_from_proto(message.counted) == shard.counted()
    assert len(shard.counted()) <= 2, "finished epochs, and the present one"
    assert len(str(runs_to_json(shard.counted()))) < 100


def test_the_ledger_is_read_in_a_thread_and_once_for_all_who_ask() -> None:
    shard = trained(30, Mode.SYNC)
    asked: list[int] = []
    threads: list[int] = []

    async def ask(*arguments: Any) -> list[Any]:
        asked.append(threading.get_ident())
        await asyncio.sleep(0)
        return [ledger_of(shard, {1: "worker-0", 2: "worker-1"})] * 2

    class Slow(Accounts):
        def __init__(self, *arguments: Any) -> None:
            threads.append(threading.get_ident())
            super().__init__(*arguments)

    async def main() -> list[coordinator_pb2.AccountsResponse]:
        job: Any = SimpleNamespace(
            shards=SimpleNamespace(ask=ask),
            schedule=SimpleNamespace(data=DATA, origin=SCHEDULE),
            registry=SimpleNamespace(ready=True),
            poison=SimpleNamespace(slices={(0, 1)}),
            tasks=SimpleNamespace(begin=lambda work, awaited: asyncio.ensure_future(work)),
            options=SimpleNamespace(job="j"),
            timeline=1,
        )
        accounting = Accounting(job)
        wanted = [
            coordinator_pb2.AccountsRequest(),
            coordinator_pb2.AccountsRequest(slices=True),
            coordinator_pb2.AccountsRequest(epoch=4),
        ]
        return await asyncio.gather(*map(accounting.of, wanted))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paramserver.coordinator.work.accounts.Accounts", Slow)
        plain, slices, later = asyncio.run(main())
    assert len(asked) == len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert [epoch.epoch for epoch in plain.epochs] == [0, 1, 2, 3, 4, 5]
    assert (plain.begun, plain.total.once, plain.total.skipped, plain.total.never) == (6, 236, 4, 0)
    assert not plain.epochs[0].slices
    assert [(one.index, one.slices, list(one.workers)) for one in slices.epochs[0].slices[:2]] == [
        (0, 1, ["worker-0"]),
        (1, 1, ["worker-1"]),
    ]
    assert [epoch.epoch for epoch in later.epochs] == [4, 5]


def test_checkpoints_of_long_ago_are_forgotten() -> None:
    versions = 1500
    machine = Checkpointing()
    machine.begin(1)
    for version in range(1, versions + 1):
        part = Part(1, version, Copy.SAVED, revision=0)
        machine.handle(Reported(0, [part], 1, 0, version))
        machine.handle(Written(1, version, 10))
    assert len(machine._states) <= 1001
    assert machine.safe(versions)
    assert machine.safe(5)
    assert not machine.safe(versions + 1)
    assert machine.saved(versions)


def test_curves_of_an_old_job_fit_into_one_answer() -> None:
    history = History()
    for step in range(POINTS + 1):
        history.add(StepValues(step, 1, {f"m{name}": 1.0 for name in range(64)}), 1000.0 + step)
    job: Any = SimpleNamespace(records=SimpleNamespace(history=history), reports=None)
    told = Course(job).tell(0.0)
    assert NAMES > len(told.curves) == 64
    assert sum(len(curve.points) for curve in told.curves) <= ALL_POINTS
    assert {curve.points[-1].step for curve in told.curves} == {POINTS}
    history = History()
    for step in range(POINTS):
        history.add(StepValues(step, 1, {"loss": 1.0}), 1000.0 + step)
    job.records.history = history
    assert len(Course(job).tell(0.0).curves[0].points) == MAX_POINTS


def test_a_long_record_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers on which workers have agreed, in each epoch, are in the record: in JSON they take a second."""
    job: Any = SimpleNamespace()
    agreeing, record = Agreeing(job), coordinator_pb2.JobRecord()
    agreeing.restore(coordinator_pb2.Agreed(name="loss", epoch=epoch, count=1, value=0.5) for epoch in range(2000))
    agreeing.write(record)
    assert [one.epoch for one in record.agreed] == list(range(2000))
    threads: list[int] = []
    real = journal_module._json

    def in_json(value: bytes) -> Any:
        threads.append(threading.get_ident())
        return real(value)

    monkeypatch.setattr(journal_module, "_json", in_json)

    async def main() -> bytes:
        store = MemoryStore()
        journal = await Journal.open(store, "memory")
        journal.record(record, None)
        await journal.settled()
        entry = await store.load("state")
        await journal.close()
        assert entry is not None
        return entry.value

    stored = asyncio.run(main())
    assert threads
    assert threading.get_ident() not in threads
    # A number takes about 90 bytes. There are at most 20,000 of them.
    assert len(stored) < 2000 * 120
