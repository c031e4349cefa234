"""The coordinator performs the commands of a mode change: calls to shards, leases, waits, and what the caller hears."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from paramserver import errors
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.core.job.life import Phase
from paramserver.core.layout.lr_scaling import LrScaling
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

SYNC, ASYNC = Consistency(Mode.SYNC), Consistency(Mode.ASYNC)
TO_ASYNC = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC)
TO_SYNC = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_SYNC)


class Job:
    """Two shards at ``version``, and everything that `ModeChange` uses of a job. ``did``: in order."""

    def __init__(self, now: Consistency) -> None:
        self.did: list[str] = []
        self.version, self.answers = 5, True
        self.consistency = now
        self.options = SimpleNamespace(job="a job", sync_batchnorm=False, step_slices=4, lr_scaling=LrScaling())
        self.timeline, self.term = 0, 1
        self.members, self.resizing = SimpleNamespace(generation=3), SimpleNamespace(under_way=False)
        self.life = SimpleNamespace(phase=Phase.RUNNING, agree=self.agree)
        self.leasing = SimpleNamespace(
            table=object() if now.mode is Mode.ASYNC else None,
            drain=self.doing("drain"),
            resume=self.doing("lease again"),
            begin=self.begin,
        )
        self.schedule = SimpleNamespace(
            begin_async=lambda version: f"leases from {version}", begin_sync=self.begin_sync
        )
        self.refresh = self.doing("tell members")
        self.shards = self

    def doing(self, what: str) -> Callable[[], Awaitable[None]]:
        async def do() -> None:
            self.did.append(what)

        return do

    def agree(self, setting: Consistency) -> None:
        self.did.append(f"{setting} from {setting.from_version}")
        self.consistency = setting

    async def begin(self, table: object) -> None:
        self.did.append(f"lease {table}")

    def begin_sync(self, version: int, _: object) -> None:
        self.did.append(f"steps from {version}")

    async def stats(self) -> list[shard_pb2.StatsResponse]:
        return [shard_pb2.StatsResponse(version=self.version)] * 2

    async def ask(self, _: str, request: Any, *__: Any, present: bool = False) -> list[Any]:
        self.did.append(shard_pb2.Phase.Name(request.phase).removeprefix("PHASE_"))
        if not self.answers:
            await asyncio.Event().wait()
        return [shard_pb2.SetConsistencyResponse(scheduled=True)] * 2


async def passes(true: Callable[[], bool]) -> None:
    """Wait until it is true."""
    async with asyncio.timeout(20.0):
        while not true():
            await asyncio.sleep(0.001)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        await work()

    asyncio.run(asyncio.wait_for(go(), 60.0))


def test_steps_become_leases_at_the_boundary() -> None:
    async def work() -> None:
        job: Any = Job(SYNC)
        change = ModeChange(job)
        asked = asyncio.create_task(change.change(TO_ASYNC))
        await passes(lambda: "COMMIT" in job.did)
        assert (change.under_way, change.wanted, change.agreed) == (True, change.agreed, change.agreed)
        job.version = 7
        agreed = replace(ASYNC, revision=1, from_version=7)
        assert await asked == agreed == job.consistency == change.agreed
        now = "async with staleness unbounded from 7"
        assert job.did == ["PREPARE", "COMMIT", now, "tell members", "lease leases from 7"]
        assert not change.under_way
        assert await change.change(TO_ASYNC) == agreed, "nothing to do"

    run(work)


@pytest.mark.parametrize(
    ("slices", "scaling", "says"),
    [
        (4, LrScaling(), True),
        (1, LrScaling(), False),
        (4, LrScaling("linear", 4), False),
        (4, LrScaling("sqrt"), False),
    ],
)
def test_a_rate_that_was_chosen_for_steps_is_named_when_updates_have_one_slice(
    slices: int, scaling: LrScaling, says: bool
) -> None:
    """Four updates with the rate of one, on old weights and with momentum, made networks with BatchNorm diverge."""
    job: Any = Job(SYNC)
    job.options.step_slices, job.options.lr_scaling = slices, scaling

    async def work() -> None:
        change = ModeChange(job)
        asked = asyncio.create_task(change.change(TO_ASYNC))
        await passes(lambda: "COMMIT" in job.did)
        job.version = 7
        await asked

    with structlog.testing.capture_logs() as log:
        run(work)
    said = [one["event"] for one in log if one["log_level"] == "warning"]
    assert [text.partition(",")[0] for text in said] == ["an update has one slice from now on"] * says
    assert all("training.lr_scaling = auto" in text for text in said)
    told = [one["event"] for one in log if "learning rates are multiplied" in one["event"]]
    assert bool(told) == (scaling.rule != "none")


def test_leases_become_steps_when_all_slices_are_done() -> None:
    async def work() -> None:
        job: Any = Job(ASYNC)
        await ModeChange(job).change(TO_SYNC)
        assert job.did == ["drain", "PREPARE", "COMMIT", "steps from 5", "sync from 5", "tell members", "lease None"]

    run(work)


def test_a_change_whose_time_is_up_is_taken_back_and_says_so() -> None:
    async def work() -> None:
        job: Any = Job(ASYNC)
        job.leasing.drain = asyncio.Event().wait
        request = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_SYNC, wait_s=0.01)
        with pytest.raises(errors.DeadlineError, match="the change to sync was given up"):
            await ModeChange(job).change(request)
        assert job.did == ["lease again"]

    run(work)


def test_a_change_that_is_agreed_comes_into_force_later_and_says_so() -> None:
    async def work() -> None:
        job: Any = Job(SYNC)
        change = ModeChange(job)
        request = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC, wait_s=0.2)
        with pytest.raises(errors.DeadlineError, match="is agreed, but its version was not reached"):
            await change.change(request)
        # The time of a change that waits for this one is up, too: that one is not agreed.
        request = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_SYNC, wait_s=0.01)
        with pytest.raises(errors.DeadlineError, match="the change to sync was given up"):
            await change.change(request)
        job.version = 7
        await passes(lambda: job.consistency.mode is Mode.ASYNC)

    run(work)


def test_a_change_ends_with_its_timeline_and_is_brought_back_on_the_next_one() -> None:
    async def work() -> None:
        job: Any = Job(SYNC)
        change = ModeChange(job)
        asked = asyncio.create_task(change.change(TO_ASYNC))
        await passes(lambda: "COMMIT" in job.did)
        await change.close()
        with pytest.raises(errors.UnavailableError, match="was interrupted, since all servers begin anew"):
            await asked
        after = change.successor()
        assert after.next_revision() == 2
        after.bring_back()
        await passes(lambda: job.did.count("COMMIT") == 2)
        job.version = 7
        await passes(lambda: job.consistency.mode is Mode.ASYNC)

    run(work)


def test_the_next_coordinator_completes_what_is_agreed() -> None:
    """Once: the setting is not brought back in addition."""

    async def work() -> None:
        job: Any = Job(SYNC)
        change = ModeChange(job)
        agreed = replace(ASYNC, revision=4, from_version=7)
        await change.settle(agreed, [3, 4])
        await change.complete(agreed)
        change.bring_back()
        job.version = 7
        await passes(lambda: not change.under_way)
        assert job.did[:2] == ["ABORT", "COMMIT"]
        assert job.did.count("PREPARE") == 0
        assert job.consistency == agreed

    run(work)
