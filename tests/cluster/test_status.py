"""What people are shown of a job in which something goes wrong, and when that is over."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paramserver import errors
from paramserver.cli.look import status as command
from paramserver.cli.look.facts import describe
from paramserver.membership import session
from paramserver.results.verdict import closing_lines
from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import CALL_S, Cluster, Died, Worker, until, wait
from tests.support.cluster.programs import Program, dataset
from tests.support.failover.takeover import Fleet

SAMPLES, BATCH, EPOCHS = 48, 4, 2


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are short here, so members report more often."""
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


def program(each: Callable[[Context, int], object]) -> Program:
    return Program(dataset(SAMPLES), BATCH, EPOCHS, each=each)


def by_name(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = [process["name"] for process in facts["processes"]]
    assert len(names) == len(set(names)), f"one line for each name: {names}"
    return {process["name"]: process for process in facts["processes"]}


def checked(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code of `paramserver status --check` for this state."""
    monkeypatch.setattr(command, "find_target", lambda *_: type("Target", (), {"status": lambda _: None})())
    monkeypatch.setattr(command, "describe", lambda _: facts)
    code = command.status(check=True)
    assert facts["reason"] in "".join(capsys.readouterr().out.split("\n"))
    return code


class Hold:
    """Holds every worker before a slice until it is released."""

    def __init__(self, at: int = 2) -> None:
        self.at = at
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, ctx: Context, slices: int) -> None:
        if slices == self.at:
            self.reached.set()
            wait(self.released, "the release of the workers", 60.0)


def test_a_lost_server_is_shown_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold, later = Hold(), Hold(at=6)  # the job must not end before it is seen to train

    def each(ctx: Context, slices: int) -> None:
        hold(ctx, slices)
        later(ctx, slices)

    with Fleet(lease_s=1.5, places=("leader",), cluster__stall_s=0.5) as fleet:

        def look() -> dict[str, Any]:
            reply = fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest())
            assert isinstance(reply, coordinator_pb2.StatusResponse)
            return describe(reply)

        fleet.begin(program(each))
        wait(hold.reached, "the workers in their third slice")

        until("all are shown", lambda: {p["state"] for p in look()["processes"]} == {"training"})
        fleet.call(fleet.keepers[1].cut)
        hold.released.set()

        def standing_still() -> dict[str, Any] | None:
            facts = look()
            shown = by_name(facts)
            still = facts["lost"] and {shown[f"worker-{rank}"]["state"] for rank in (0, 1)} == {"waiting"}
            return facts if still else None

        facts = until("it is missed, and all wait", standing_still)
        assert facts is not None
        assert (facts["lost"], facts["losses"]) == (["server-1"], 1)
        assert facts["state"] in ("degraded", "stuck")
        assert "server-1" in facts["reason"]
        gone = by_name(facts)["server-1"]
        assert (gone["state"], gone["gone"]) == ("failed", True)
        assert gone["reason"] == "server-1 was not heard of until its lease ended"
        facts = until("nobody here starts it again", lambda: (now := look())["state"] == "stuck" and now)
        assert facts
        assert re.match(r"nothing has counted for \d+ s: server-1 at .* is lost: bring it back", facts["reason"])
        assert checked(facts, monkeypatch, capsys) == 5
        fleet.call(fleet.keepers[1].heal)
        facts = until("it is back", lambda: (now := look())["lost"] == [] and now)
        assert facts
        assert (facts["losses"], by_name(facts)["server-1"]["gone"]) == (1, False)
        facts = until("training goes on", lambda: (now := look())["state"] == "training" and now)
        assert facts
        assert checked(facts, monkeypatch, capsys) == 0
        later.released.set()
        fleet.finish()


def test_a_script_that_crashed_and_one_that_was_replaced() -> None:
    """A crash is no end; a successor takes the place in the table, and the totals hold what both did."""
    hold = Hold()
    died, failed = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 1 and not died.is_set():
            until("its first slice is told of", lambda: by_name(describe(cluster.status()))["worker-1"]["slices"] == 1)
            died.set()
            raise Died
        if ctx.rank == 2 and slices == 1 and not failed.is_set():
            failed.set()
            ctx.engine.abandon("ValueError: the label is 7")
            raise Died
        if slices == 2:
            hold(ctx, slices)

    with Cluster(3, 1, slices_per_step=6, grace_s=0.1) as cluster:
        workers = [cluster.start(program(each)) for _ in range(3)]
        wait(died, "the death of worker-1")

        def both() -> dict[str, Any] | None:
            facts = describe(cluster.status())
            return facts if all(by_name(facts)[f"worker-{rank}"]["gone"] for rank in (1, 2)) else None

        facts = until("both are gone", both)
        assert facts is not None
        shown = by_name(facts)
        assert {shown[f"worker-{rank}"]["state"] for rank in (1, 2)} == {"failed"}
        assert shown["worker-2"]["reason"] == "its script failed: ValueError: the label is 7"
        assert (facts["state"], facts["lost"]) == ("degraded", ["worker-1"])
        assert "worker-1 was not heard of until its lease ended" in facts["reason"]
        assert "the label is 7" in facts["reason"]
        done = shown["worker-1"]["slices"]
        successors = [Worker(cluster, rank, program(each), {}) for rank in (1, 2)]
        cluster.workers += successors
        until("both are replaced", lambda: describe(cluster.status())["state"] == "training")
        facts = describe(cluster.status())
        assert (facts["lost"], facts["losses"], len(by_name(facts))) == ([], 1, 5)
        hold.released.set()
        cluster.join([workers[0], *successors])
        shown = by_name(describe(cluster.status()))
        assert shown["worker-1"]["slices"] >= done == 1
        assert {shown[f"worker-{rank}"]["state"] for rank in range(3)} == {"done"}
        assert sum(shown[f"worker-{rank}"]["slices"] for rank in range(3)) >= EPOCHS * SAMPLES // BATCH


def test_a_stopped_job_says_how_far_it_came() -> None:
    hold = Hold(at=14)  # in the second of the two epochs of 12 slices
    with Cluster(1, 1) as cluster:
        cluster.start(program(hold))
        wait(hold.reached, "the second epoch")
        until("it has said so", lambda: any(process.epochs_planned for process in cluster.status().processes))
        request = coordinator_pb2.StopRequest(reason="enough")
        cluster.job.background.run(cluster.job.coordinator.stop(request), CALL_S)
        status = cluster.status()
        assert (status.state, status.reason) == ("stopped", "enough")
        summary = cluster.outcome().summary
        hold.released.set()
    assert (summary["state"], summary["epochs"], summary["epochs_planned"]) == ("stopped", 1, EPOCHS)
    assert closing_lines(status, dict(summary))[0].startswith("stopped: sync, 14 steps, 1 of 2 epochs in ")


def test_a_launcher_says_how_its_run_has_ended_and_nothing_else_changes() -> None:
    hold = Hold(at=2)
    with Cluster(1, 1) as cluster:
        cluster.start(program(hold))
        wait(hold.reached, "a slice")
        said = ["done: sync, 24 steps in 1.0 s", "everything promised is there: 24 steps"]
        stop = cluster.job.coordinator.stop
        with pytest.raises(errors.ProtocolError, match="done, failed, stopped, not as 'well'"):
            cluster.job.background.run(stop(coordinator_pb2.StopRequest(state="well", said=said)), CALL_S)
        cluster.job.background.run(stop(coordinator_pb2.StopRequest(state="done", said=said)), CALL_S)
        status = cluster.status()
        assert (status.state, status.reason, list(status.said)) == ("done", "sync, 24 steps in 1.0 s", said)
        hold.released.set()
        cluster.join()
        assert cluster.outcome().summary["steps"] == 24
        said = ["ended: sync", "promise broken: the disk is full"]
        cluster.job.background.run(stop(coordinator_pb2.StopRequest(state="failed", said=said)), CALL_S)
        assert (cluster.status().state, cluster.status().reason) == ("failed", "the disk is full")


def test_more_workers_than_slices() -> None:
    """It is said at scaling and in `status`; whoever prints is one that computes; the summary knows it, too."""
    hold, scaled = Hold(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        hold(ctx, slices)
        # This worker has slices after the scaling, so no step ends before the look.
        if ctx.engine.member.session.name == "worker-3":
            wait(scaled, "the look at all of them")

    def mains() -> list[str]:
        contexts = [worker.context for worker in cluster.workers]
        return [ctx.engine.member.session.name for ctx in contexts if ctx is not None and ctx.is_main]

    with Cluster(2, 1, launched=True) as cluster:
        for _ in range(2):
            cluster.start(program(each))
        wait(hold.reached, "the third slices")
        until("one is the main one", lambda: mains() == ["worker-0"])
        for _ in range(2):
            cluster.start(program(each))
        request = coordinator_pb2.ScaleRequest(workers=4, wait_s=CALL_S)
        note = cluster.job.background.run(cluster.job.coordinator.scale(request), CALL_S).note
        assert note == (
            "a step has 2 slices and there are 4 workers, so worker-1, worker-2 have none to compute: "
            "scale to workers=2, or begin the next job with training.slices_per_step = 4"
        )
        hold.released.set()

        def shown() -> dict[str, str]:
            return {name: one["state"] for name, one in by_name(describe(cluster.status())).items() if "work" in name}

        wanted = {"worker-0": "training", "worker-1": "idle", "worker-2": "idle", "worker-3": "training"}
        until("two are idle", lambda: shown() == wanted)
        assert (cluster.status().state, cluster.status().reason) == ("training", note)
        assert mains() == ["worker-0"], "the main worker stays, and has slices"
        scaled.set()
        cluster.join()
        outcome = cluster.outcome()
    assert outcome.summary["idle_workers"] == ["worker-1", "worker-2"]
    assert outcome.summary["samples"] == EPOCHS * SAMPLES


def test_scripts_that_hand_in_nothing_make_a_job_stuck_until_they_do() -> None:
    hold = Hold()
    with Cluster(1, 1, stall_s=0.3, max_idle_s=0.1) as cluster:
        worker = cluster.start(program(hold))
        wait(hold.reached, "the third slice")
        until("it is stuck", lambda: cluster.status().state == "stuck")
        assert "worker-0 is at work, but hand in nothing" in cluster.status().reason
        hold.released.set()
        until("it gets on", lambda: cluster.status().state != "stuck")
        cluster.join([worker])


def test_a_job_in_which_nobody_can_do_anything_ends_with_whom_it_waits_for() -> None:
    """No contribution arrives any more, though everybody lives."""
    plan = FaultPlan([Rule(name, Fault.DROP_REQUEST, skip=3) for name in ("Shard.Push", "Shard.Exchange")])
    with Cluster(1, 1, stall_s=0.5, max_idle_s=1.0, faults=plan) as cluster:
        worker = cluster.start(program(lambda *_: None))
        until("it is stuck", lambda: cluster.status().state == "stuck")
        worker.join(time.monotonic() + 20.0)
        assert plan.fired
        assert isinstance(worker.error, errors.JobFailedError)
        status = cluster.status()
    assert status.state == "failed"
    assert status.reason.startswith("the job has been stuck for 1 s (cluster.max_idle_s): nothing has counted for ")
    assert "server-0 waits for step " in status.reason
    assert "(worker-0)" in status.reason
