"""The leader dies at any moment, and the one that stands by goes on: same bytes, every slice once, no number twice."""

from __future__ import annotations

import random
import threading

import pytest

from paramserver.coordinator.leadership import takeover as taking
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.core.work.leases import SliceLeases
from paramserver.v1 import types_pb2
from paramserver.worker.context import Context
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Died, item_of, recorded, until, wait
from tests.support.cluster.pacer import Pacer
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import program, twin
from tests.support.cluster.taps import Trap
from tests.support.failover.ledger import BATCH, CELLS, PER_EPOCH, calm, change_once, counted_once
from tests.support.failover.takeover import Fleet


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever died with the leader is given up soon."""
    monkeypatch.setattr(taking, "_FIND_S", 1.0)


# ---- at every point where it does something

# Those that are long are near another one.
POINTS = [
    pytest.param("store save state", 0, "before", marks=pytest.mark.long),
    ("store save state", 1, "after"),
    pytest.param("answer Coordinator.Join", 0, "before", marks=pytest.mark.long),
    ("answer Coordinator.Join", 1, "after"),
    pytest.param("answer Coordinator.Join", 3, "after", marks=pytest.mark.long),
    pytest.param("answer Coordinator.RegisterData", 0, "after", marks=pytest.mark.long),
    pytest.param("answer Coordinator.RegisterModel", 0, "before", marks=pytest.mark.long),
    pytest.param("call Shard.Configure", 0, "between", marks=pytest.mark.long),
    ("call Shard.Configure", 1, "between"),
    pytest.param("store save model", 0, "before", marks=pytest.mark.long),
    pytest.param("store save model", 0, "after", marks=pytest.mark.long),
    ("answer Coordinator.RegisterModel", 0, "after"),
    pytest.param("call Shard.Activate", 0, "before", marks=pytest.mark.long),
    pytest.param("call Shard.Activate", 0, "between", marks=pytest.mark.long),
    pytest.param("call Shard.Activate", 1, "between", marks=pytest.mark.long),
    ("call Shard.Activate", 1, "after"),
    pytest.param("call Shard.SetMembers", 0, "before", marks=pytest.mark.long),
    ("call Shard.SetMembers", 1, "between"),
    ("answer Coordinator.InitializeDone", 0, "after"),
    pytest.param("call Shard.SetMembers", 2, "between", marks=pytest.mark.long),
    pytest.param("call Shard.Stats", 2, "before", marks=pytest.mark.long),
    pytest.param("store delete model", 0, "before", marks=pytest.mark.long),
    ("store delete model", 0, "after"),
]


@pytest.mark.parametrize(("what", "nth", "when"), POINTS)
def test_the_leader_is_killed_at(what: str, nth: int, when: str) -> None:
    trap = Trap(what, nth, when)
    with Fleet(trap=trap) as fleet:
        fleet.begin(program())
        summary = fleet.finish()
    assert trap.fired.is_set(), f"the leader never came to {what} number {nth}; it did {trap.seen}"
    calm(summary)


# ---- in the middle of steps


class KillAt:
    """Kills the leader when so many slices have been begun, all workers together; once for each number."""

    def __init__(self, *at: int) -> None:
        self.left = sorted(at)
        self.begun = 0
        self.fleet: Fleet | None = None
        self._lock = threading.Lock()

    def __call__(self, ctx: Context, slices: int) -> None:
        with self._lock:
            self.begun += 1
            due = bool(self.left) and self.begun >= self.left[0]
            if due:
                self.left.pop(0)
                assert self.fleet is not None
                self.fleet.kill(self.fleet.leader)


# The first ones with every `make test`, all of them with `make test-long`.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]


@pytest.mark.parametrize("seed", SEEDS)
def test_sync_killed_at_random_steps(seed: int) -> None:
    """Twice in a job: the third coordinator takes over from the second."""
    chance = random.Random(seed)
    kills = KillAt(chance.randint(1, 12), chance.randint(13, 26))
    with Fleet(places=("leader", "standby", "third"), workers=chance.randint(1, 3)) as fleet:
        kills.fleet = fleet
        fleet.begin(program(kills))
        summary = fleet.finish()
    assert not kills.left, f"seed {seed}: a kill never came"
    assert len(fleet.reigns) >= 2, f"seed {seed}: nobody took over"
    calm(summary)


@pytest.mark.parametrize("seed", SEEDS)
def test_async_killed_at_random_slices(seed: int) -> None:
    """Each slice of each epoch is counted once on every shard: done means that all shards say so."""
    chance = random.Random(seed)
    epochs = 4
    kills = KillAt(chance.randint(1, 40), chance.randint(45, 80))
    with recorded() as log, Fleet(mode="async", places=("leader", "standby", "third")) as fleet:
        kills.fleet = fleet
        fleet.begin(LedgerProgram(CELLS, BATCH, epochs, kills))
        summary = fleet.finish()
    assert not kills.left, f"seed {seed}: a kill never came"
    assert len(fleet.reigns) >= 2, f"seed {seed}: nobody took over"
    counted_once(log, epochs)
    assert summary["contributions_applied"] == PER_EPOCH * epochs == summary["steps"]
    # A slice that one worker still held may have been given to another one, too.
    repeated = BATCH * summary["contributions_duplicate"]
    assert CELLS * epochs <= summary["samples"] <= CELLS * epochs + repeated


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_leader_and_worker_die_at_once(mode: str) -> None:
    killed = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 3:
            fleet.kill(fleet.leader)
            killed.set()
            raise Died
        if ctx.rank == 0 and slices == 6:
            wait(killed, "the deaths")

    script = program(each) if mode == "sync" else LedgerProgram(CELLS, BATCH, 2, each)
    with recorded() as log, Fleet(mode=mode, lease_s=1.0) as fleet:
        fleet.begin(script)
        summary = fleet.finish()
    assert len(fleet.reigns) == 2
    if mode == "sync":
        assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()
    else:
        counted_once(log, 2)
    assert "worker-1" in fleet.record().lost


# ---- while the mode changes

MODE_CHANGES = [
    ("sync", "PREPARE", 0, "between"),
    pytest.param("sync", "PREPARE", 1, "after", marks=pytest.mark.long),
    pytest.param("sync", "COMMIT", 0, "between", marks=pytest.mark.long),
    ("sync", "COMMIT", 1, "between"),
    ("sync", "COMMIT", 1, "after"),
    ("async", "PREPARE", 0, "between"),
    pytest.param("async", "PREPARE", 1, "after", marks=pytest.mark.long),
    ("async", "COMMIT", 0, "between"),
    pytest.param("async", "COMMIT", 1, "between", marks=pytest.mark.long),
    pytest.param("async", "COMMIT", 1, "after", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("start", "phase", "nth", "when"), MODE_CHANGES)
def test_the_leader_is_killed_while_the_mode_changes(start: str, phase: str, nth: int, when: str) -> None:
    """What one shard has committed, all commit; what none has, is taken back. Either way each sample counts once."""
    other = "async" if start == "sync" else "sync"
    epochs, pacer, trap = 5, Pacer(), Trap(f"call Shard.SetConsistency {phase}", nth, when)
    with recorded() as log, Fleet(mode=start, slices_per_step=3, trap=trap) as fleet:
        fleet.begin(LedgerProgram(CELLS, BATCH, epochs, pacer))
        pacer.go(31)
        pacer.free()
        assert change_once(fleet, other)
        assert trap.fired.is_set()
        service = fleet.took_over()
        agreed = {server.consistency.mode for server in fleet.stats()}
        summary = fleet.finish()
    counted_once(log, epochs)
    assert summary["mode"] == (other if phase == "COMMIT" else start)
    assert summary["contributions_applied"] == PER_EPOCH * epochs
    assert service.job.term == 2
    assert agreed
    kinds = {type(applied.contribution.name) for applied in log}
    assert kinds == ({SyncName, AsyncName} if phase == "COMMIT" else {SyncName if start == "sync" else AsyncName})


def test_a_worker_dies_with_the_leader_while_a_change_waits_for_its_version() -> None:
    """The boundary lies ahead, and to reach it the others must hear from the new leader that the dead one is gone."""
    epochs, dying, go = 5, threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 4:
            dying.set()
            wait(go, "the word to die", 30.0)
            raise Died

    trap = Trap("call Shard.SetConsistency COMMIT", 1, "after")
    with recorded() as log, Fleet(slices_per_step=2, lease_s=1.0, trap=trap) as fleet:
        fleet.begin(LedgerProgram(CELLS, BATCH, epochs, each))
        wait(dying, "worker 1 in its fifth slice")
        assert change_once(fleet, "async")
        assert trap.fired.is_set()
        go.set()
        summary = fleet.finish()
    counted_once(log, epochs)
    assert summary["mode"] == "async"


# ---- nobody leads


def test_training_goes_on_without_a_leader_and_the_end_is_reported_later() -> None:
    half, ended = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 2:
            fleet.kill(fleet.leader)
            half.set()

    with Fleet(places=("leader",)) as fleet:
        fleet.begin(program(each))
        wait(half, "the death of the leader")
        until("all steps are done", lambda: [server.version for server in fleet.stats()] == [8, 8])
        engines = [hand.context.engine for hand in fleet.hands if hand.context is not None]
        until("the workers are through", lambda: all(engine.progress.through for engine in engines))
        for hand in fleet.hands:
            hand.join(0.5)
            assert hand.alive, "a worker waits to report its end"
        ended.set()
        fleet.places[:] = ["leader"]
        fleet.coordinate("leader", resume=True)
        summary = fleet.finish()
    assert ended.is_set()
    calm(summary)


def test_a_leader_that_is_asked_to_end_hands_over_at_once() -> None:
    """No lease has to run out, and the state is written to the end."""
    import signal

    begun = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 2:
            fleet.call(lambda: fleet.chiefs[0].coordinating.on_signal(signal.SIGTERM))
            until("the first one has ended", fleet.chiefs[0].task.done)
            fleet.took_over()
            begun.set()

    with Fleet(lease_s=1000.0) as fleet:
        first = fleet.begin(program(each))
        fleet.join()
        assert first.task.result() == 128 + signal.SIGTERM
        summary = fleet.finish()
    assert begun.is_set()
    calm(summary)


def test_steps_need_no_store() -> None:
    """Ten times the steps, and not one operation more."""
    spent = {}
    for epochs in (2, 20):
        first, last = [0], [0]

        def each(ctx: Context, slices: int, first: list[int] = first, last: list[int] = last) -> None:
            if ctx.rank == 0:
                first[0] = first[0] or fleet.chiefs[0].store.operations
                last[0] = fleet.chiefs[0].store.operations

        with Fleet(workers=1, lease_s=1000.0, places=("leader",)) as fleet:
            fleet.begin(LedgerProgram(CELLS, BATCH, epochs, each))
            summary = fleet.finish()
        assert summary["steps"] == 6 * epochs
        spent[epochs] = last[0] - first[0]
    assert max(spent.values()) <= 2, f"operations during the steps, by epochs: {spent}"


def test_a_server_is_away_while_the_job_is_taken_over() -> None:
    """For longer than anybody's lease; nobody is given up meanwhile."""
    cut = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 2:
            fleet.call(fleet.keepers[1].cut)
            fleet.kill(fleet.leader)
            cut.set()

    with Fleet(lease_s=0.5) as fleet:
        fleet.begin(program(each))
        wait(cut, "the cut")
        standby = fleet.chiefs[1].coordinating
        until("the standby takes over", lambda: standby.endpoint.doing == "takes the job over")
        assert not threading.Event().wait(2.0)
        assert standby.endpoint.service is None
        fleet.call(fleet.keepers[1].heal)
        fleet.took_over()
        assert not fleet.record().losses
        summary = fleet.finish()
    calm(summary)


# ---- asynchronous leases


def test_lost_replies_leave_no_slice_behind() -> None:
    """What was leased in a reply that got lost goes back to the queue with the next request."""
    epochs = 3
    with recorded() as log, Fleet(workers=2, mode="async") as fleet:
        script = LedgerProgram(CELLS, BATCH, epochs)
        fleet.begin()
        plans = [FaultPlan([Rule("Coordinator.Lease", Fault.LOSE_REPLY, share=0.3, times=5)], seed) for seed in (1, 2)]
        for plan in plans:
            fleet.work(script, plan)
        summary = fleet.finish()
    for plan in plans:
        plan.check()
    counted_once(log, epochs)
    assert summary["contributions_applied"] == PER_EPOCH * epochs


def test_without_reconciling_a_lost_reply_would_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with `holding` ignored, slices are out for ever."""
    monkeypatch.setattr(SliceLeases, "reconcile", lambda self, worker, holding: False)
    plan = FaultPlan([Rule("Coordinator.Lease", Fault.LOSE_REPLY, times=1, skip=1)])
    with Fleet(workers=1, mode="async", places=("leader",)) as fleet:
        fleet.begin()
        hand = fleet.work(LedgerProgram(CELLS, BATCH, 1), plan)
        leader = fleet.leader

        def stuck() -> bool:
            table = leader.service.job.leasing.table if leader.service else None
            held = table is not None and table.nothing_left(0) and sum(table.holders(0).values()) > 0
            waits = hand.context is not None and "worker-0" in hand.context.engine.member.waiting_for
            return held and waits

        until("the only worker waits for itself", stuck)
    plan.check()


def test_without_settling_a_change_that_was_prepared_would_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of changes above can fail: a boundary that nobody commits or takes back is never passed."""

    async def nothing(self: ModeChange, *_: object) -> None:
        pass

    monkeypatch.setattr(ModeChange, "settle", nothing)
    pacer, trap = Pacer(), Trap("call Shard.SetConsistency PREPARE", 1, "after")
    with Fleet(slices_per_step=3, trap=trap) as fleet:
        fleet.begin(LedgerProgram(CELLS, BATCH, 5, pacer))
        pacer.go(31)
        pacer.free()
        assert change_once(fleet, "async")
        fleet.took_over()

        def held() -> bool:
            stats = fleet.stats()
            return all(s.HasField("scheduled") and s.version + 1 == s.scheduled.from_version for s in stats)

        until("both shards stand before the boundary", held)
        versions = [server.version for server in fleet.stats()]
        assert not threading.Event().wait(0.5)
        assert [server.version for server in fleet.stats()] == versions


def test_async_the_leader_dies_before_the_data_is_known() -> None:
    """Slices are cut from the data that is registered then, not taken for names without end."""
    epochs, trap = 2, Trap("answer Coordinator.RegisterData", 0, "before")
    with recorded() as log, Fleet(mode="async", trap=trap) as fleet:
        fleet.begin(LedgerProgram(CELLS, BATCH, epochs))
        summary = fleet.finish()
    assert trap.fired.is_set(), trap.seen
    counted_once(log, epochs)
    assert summary["contributions_applied"] == PER_EPOCH * epochs


# ---- a slice that kills each worker that computes it


def test_the_deaths_at_a_slice_are_counted_on() -> None:
    """Two workers die at a slice, one after the other, then the leader dies: the third worker's death names the slice.

    The last coordinator alone has seen one death, which says nothing.
    """
    deaths = []

    def each(ctx: Context, slices: int) -> None:
        item = item_of(ctx)
        if item.index == 1:
            deaths.append(ctx)
            raise Died

    with Fleet(servers=1, workers=1, slices_per_step=1, lease_s=1.0) as fleet:
        leader = fleet.begin(program(each))
        until("the first death is noticed", lambda: fleet.record().deaths_in_a_row == 1)
        fleet.work(program(each))
        until("the second one, too", lambda: fleet.record().deaths_in_a_row == 2)
        fleet.kill(leader)
        fleet.took_over()
        fleet.work(program(each))
        until("the job ends", lambda: fleet.record().view.state == types_pb2.JOB_STATE_FAILED)
        reason = fleet.record().view.reason
    assert len(deaths) == 3
    assert reason.startswith("each worker that computes slice 1 of epoch 1 (step 1; samples "), reason
