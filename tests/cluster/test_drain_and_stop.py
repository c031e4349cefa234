"""A worker is asked to leave, a job to end: at the boundary of a slice, and nothing that was counted is lost."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from paramserver import errors
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import CALL_S, recorded, until, wait
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import program, twin
from tests.support.failover.held import Held
from tests.support.failover.ledger import BATCH, CELLS, counted_once
from tests.support.failover.moments import EVERY
from tests.support.failover.rollback import Rig
from tests.support.failover.takeover import Fleet

ONE = ("leader",)


def drain(fleet: Fleet, name: str, wait_s: float = 20.0) -> None:
    fleet.ask("Coordinator.Drain", coordinator_pb2.DrainRequest(name=name, wait_s=wait_s), timeout_s=wait_s + 5.0)


def stop(fleet: Fleet, reason: str = "") -> None:
    fleet.ask("Coordinator.Stop", coordinator_pb2.StopRequest(reason=reason))


# ---- drain


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_is_drained(mode: str) -> None:
    """It leaves with what it had, the others do the rest: the same bytes, every slice once."""
    drained = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 3:
            wait(drained, "the end of worker 1")

    script = program(each) if mode == "sync" else LedgerProgram(CELLS, BATCH, 2, each)
    with recorded() as log, Fleet(mode=mode, places=ONE) as fleet:
        fleet.begin(script)
        until("worker 1 works", lambda: len(fleet.hands) == 2 and fleet.hands[1].context is not None)
        leader = fleet.chiefs[0]
        until("all are there", lambda: leader.service is not None and len(leader.service.job.worker_infos()) == 2)
        until("training", lambda: fleet.record().view.state == types_pb2.JOB_STATE_RUNNING)
        drain(fleet, "worker-1")
        assert leader.service is not None
        assert [worker.name for worker in leader.service.job.worker_infos()] == ["worker-0"]
        drained.set()
        fleet.hands[1].join(20.0)
        error = fleet.hands[1].error
        assert isinstance(error, errors.EndedError)
        assert str(error) == "worker-1 was asked to leave, and leaves"
        summary = fleet.finish(fleet.hands[:1])
        assert not fleet.record().losses, "it was not lost, it left"
    if mode == "sync":
        assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()
    else:
        counted_once(log, 2)


def test_only_a_worker_that_is_there_can_be_drained() -> None:
    held = Held()
    with Fleet(places=ONE) as fleet:
        fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        with pytest.raises(errors.ConfigError, match="server-0 holds a part of the model of which there is no copy"):
            drain(fleet, "server-0")
        with pytest.raises(
            errors.ConfigError,
            match="there is no worker or server 'worker-7'; there are: worker-0, worker-1, server-0, server-1",
        ):
            drain(fleet, "worker-7")
        held.released.set()
        fleet.finish()


def test_a_worker_that_computes_for_long_is_waited_for_in_vain() -> None:
    """The command says so; the worker leaves when its slice is done."""
    held = Held()
    with Fleet(places=ONE) as fleet:
        fleet.begin(program(held))
        until("worker 1 in its third slice", lambda: 1 in held.ranks)
        with pytest.raises(errors.DeadlineError, match="worker-1 was asked to leave, but has not done so yet"):
            drain(fleet, "worker-1", wait_s=0.3)
        held.released.set()
        fleet.hands[1].join(20.0)
        assert isinstance(fleet.hands[1].error, errors.EndedError)
        summary = fleet.finish(fleet.hands[:1])
    assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()


def test_all_workers_are_drained_and_another_one_comes() -> None:
    held = Held()
    with Fleet(places=ONE) as fleet:
        fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        held.released.set()
        for name in ("worker-0", "worker-1"):
            drain(fleet, name)
        for hand in fleet.hands:
            hand.join(20.0)
            assert isinstance(hand.error, errors.EndedError)
        assert fleet.record().view.state == types_pb2.JOB_STATE_RUNNING
        fleet.hands.clear()
        fleet.work(program())
        summary = fleet.finish()
    assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()


# ---- stop


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_is_stopped(mode: str, at: int) -> None:
    """The workers leave, and what there is of the result is gathered."""
    begun = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == at:
            begun.set()

    script = program(each) if mode == "sync" else LedgerProgram(CELLS, BATCH, 50, each)
    if mode == "sync":
        script.epochs = 200
    with Fleet(mode=mode, places=ONE) as fleet:
        leader = fleet.begin(script)
        wait(begun, "the start")
        stop(fleet, "no more money")
        until("the coordinator ends", leader.task.done)
        assert leader.task.result() == 0, leader.said
        for hand in fleet.hands:
            hand.join(20.0)
            assert isinstance(hand.error, errors.EndedError), hand.error
            assert str(hand.error) == "no more money"
        until("the servers end", lambda: all(keeper.task.done() for keeper in fleet.keepers))
        for keeper in fleet.keepers:
            keeper.task.result()
        record = fleet.record()
        assert record.view.state == types_pb2.JOB_STATE_STOPPED
        assert record.view.reason == "no more money"
        summary = json.loads(record.summary)
    assert summary["steps"] >= (at > 2)
    assert len(summary["weights_sha256"]) == 64
    if mode == "async":
        assert summary["contributions_applied"] <= summary["steps"]


def test_a_job_is_stopped_before_it_trains() -> None:
    with Fleet(places=ONE) as fleet:
        leader = fleet.begin()
        until(
            "the servers are there", lambda: leader.service is not None and len(leader.service.job.shards.infos()) == 2
        )
        stop(fleet)
        until("the coordinator ends", leader.task.done)
        assert leader.task.result() == 0
        assert "the job has ended without training" in leader.said
        until("the servers end", lambda: all(keeper.task.done() for keeper in fleet.keepers))
        assert fleet.record().view.state == types_pb2.JOB_STATE_STOPPED


def test_a_stopped_job_is_not_begun_again_by_the_one_that_stands_by() -> None:
    held = Held()
    with Fleet() as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        stop(fleet)
        held.released.set()
        until("the leader ends", leader.task.done)
        until("the other one ends", fleet.chiefs[1].task.done)
        assert fleet.chiefs[1].task.result() == 0
        assert fleet.reigns == [(1, "leader")]
        for hand in fleet.hands:
            hand.join(20.0)


def test_the_leader_dies_after_it_was_told_to_stop() -> None:
    """The other one does not train on: it gathers what there is."""
    held = Held()
    with Fleet(lease_s=1.0) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        stop(fleet, "enough")
        until("that is written", lambda: fleet.record().view.state == types_pb2.JOB_STATE_STOPPED)
        fleet.kill(leader)
        held.released.set()
        # A worker that leaves a stopped job tries for 2 s to say goodbye. If the other coordinator leads only later, it
        # waits for the leases of the workers, to which a takeover adds 20 s.
        until("the other one ends", fleet.chiefs[1].task.done, 2 * CALL_S)
        assert fleet.chiefs[1].task.result() == 0
        record = fleet.record()
        assert record.view.state == types_pb2.JOB_STATE_STOPPED
        assert record.view.reason == "enough"
        assert "steps" in json.loads(record.summary)
        until("the servers end", lambda: all(keeper.task.done() for keeper in fleet.keepers))
        for hand in fleet.hands:
            hand.join(20.0)
            assert isinstance(hand.error, errors.EndedError)


@pytest.mark.parametrize("also", ["", "leader"])
def test_a_server_dies_after_the_job_was_told_to_stop(also: str, tmp_path: Path) -> None:
    """The job stays stopped. It goes back to a checkpoint, since the result would lack a shard otherwise."""
    held = Held()
    with Rig(tmp_path, EVERY, lease_s=1.0) as rig:
        rig.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        stop(rig, "enough")
        until("that is written", lambda: rig.record().view.state == types_pb2.JOB_STATE_STOPPED)
        rig.kill_now("server-1", *([also] if also else []))
        until("the job goes back", lambda: rig.record().view.timeline >= 1, 2 * CALL_S)
        held.released.set()
        until("the job ends", lambda: rig.chiefs[-1].task.done() and rig.record().summary, 2 * CALL_S)
        assert rig.chiefs[-1].task.result() == 0
        record = rig.record()
        assert (record.view.state, record.view.reason) == (types_pb2.JOB_STATE_STOPPED, "enough")
        assert record.rollbacks == 1
        assert "steps" in json.loads(record.summary)
        until("the servers end", lambda: all(k.task.done() for k in rig.keepers if not k.process.killed))


# ---- the end


def test_the_job_ends_when_all_workers_are_through() -> None:
    """One of them is late; the others have left long before."""
    late = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 1:
            wait(late, "the word to go on", 60.0)

    with Fleet(mode="async", staleness="unbounded", places=ONE) as fleet:
        leader = fleet.begin(LedgerProgram(CELLS, BATCH, 1, each))
        until("the other slices are done", lambda: all(server.applied >= 12 for server in fleet.stats()))
        assert not leader.task.done()
        late.set()
        summary = fleet.finish()
    assert summary["contributions_applied"] == CELLS // BATCH
    assert summary["samples"] == CELLS


def test_a_worker_whose_script_fails_does_not_end_the_job() -> None:
    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 2:
            raise ValueError("a mistake in the script")

    with Fleet(places=ONE) as fleet:
        fleet.begin(program(each))
        fleet.hands[1].join(30.0)
        assert isinstance(fleet.hands[1].error, ValueError)
        summary = fleet.finish(fleet.hands[:1])
    assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()
