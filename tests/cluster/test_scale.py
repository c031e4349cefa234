"""The number of workers changes while the job trains: the same bytes, and nobody forgets the wish."""

from __future__ import annotations

import pytest

from paramserver import errors
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.cluster.harness import until, wait
from tests.support.cluster.small_job import program, twin
from tests.support.failover.held import Held
from tests.support.failover.takeover import Chief, Fleet

ONE = ("leader",)


def scale(fleet: Fleet, workers: int, wait_s: float = 20.0) -> int:
    """Ask for so many; returns how many there are then."""
    request = coordinator_pb2.ScaleRequest(workers=workers, wait_s=wait_s)
    reply = fleet.ask("Coordinator.Scale", request, timeout_s=wait_s + 5.0)
    assert isinstance(reply, coordinator_pb2.ScaleResponse)
    return reply.workers


def names(chief: Chief) -> list[str]:
    assert chief.service is not None
    return [worker.name for worker in chief.service.job.worker_infos()]


def training(fleet: Fleet, held: Held, workers: int) -> None:
    """All workers are in the middle of the job."""
    wait(held.reached, "the workers in their third slice")
    until("all are there", lambda: len(names(fleet.leader)) == workers)
    until("training", lambda: fleet.record().view.state == types_pb2.JOB_STATE_RUNNING)


def test_fewer_workers_without_a_launcher() -> None:
    """Those of the highest ranks leave; more can only be started by hand, and the error says how."""
    held = Held()
    with Fleet(workers=3, places=ONE) as fleet:
        fleet.begin(program(held))
        training(fleet, held, 3)
        text = r"has 3 workers, and nobody here can start more: .* paramserver start worker --join leader -- SCRIPT"
        with pytest.raises(errors.ConfigError, match=text):
            scale(fleet, 4)
        held.released.set()
        assert scale(fleet, 1) == 1
        assert names(fleet.leader) == ["worker-0"]
        for hand in fleet.hands[1:]:
            hand.join(20.0)
            assert isinstance(hand.error, errors.EndedError)
        summary = fleet.finish(fleet.hands[:1])
        assert not fleet.record().losses
    assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()


@pytest.mark.long
def test_a_launcher_sees_the_wish_and_a_takeover_keeps_it() -> None:
    held = Held()
    with Fleet() as fleet:
        leader = fleet.coordinate("leader", gather=False)
        until("somebody leads", lambda: leader.service is not None)
        standby = fleet.coordinate("standby", gather=False)
        until("the other one stands by", lambda: "stands by" in standby.coordinating.endpoint.doing)
        for index in range(2):
            fleet.serve(index)
            fleet.work(program(held))
        training(fleet, held, 2)
        assert fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest()).wanted_workers == 0
        with pytest.raises(errors.DeadlineError, match="there are 2 workers by now"):
            scale(fleet, 3, wait_s=0.2)
        assert fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest()).wanted_workers == 3
        fleet.kill(fleet.leader)
        fleet.took_over()
        assert fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest()).wanted_workers == 3
        fleet.work(program(held))  # as a launcher would
        assert scale(fleet, 3) == 3
        held.released.set()


def test_what_cannot_be_wished_for() -> None:
    held = Held()
    with Fleet(places=ONE) as fleet:
        fleet.coordinate("leader")
        until("somebody leads", lambda: fleet.chiefs[0].service is not None)
        for workers in (0, 4097):
            with pytest.raises(errors.ConfigError, match=f"has 1 to 4096 workers, not {workers}"):
                scale(fleet, workers)
        with pytest.raises(errors.ConfigError, match="has not begun to train yet"):
            scale(fleet, 2)
        for index in range(2):
            fleet.serve(index)
            fleet.work(program(held))
        training(fleet, held, 2)
        held.released.set()
        fleet.finish()
