"""A server, or the worker that uploads version 0, dies before its publication: the job needs no checkpoint to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.cluster.harness import until, wait
from tests.support.cluster.small_job import program
from tests.support.cluster.taps import Trap
from tests.support.failover.ledger import calm
from tests.support.failover.takeover import Fleet

# Those that are long are near another one.
MOMENTS = [
    pytest.param("call Shard.Configure", 1, "after", marks=pytest.mark.long),
    pytest.param("answer Coordinator.RegisterModel", 0, "after", marks=pytest.mark.long),
    pytest.param("answer Coordinator.InitializeDone", 0, "before", marks=pytest.mark.long),
    ("call Shard.Activate", 0, "before"),
]


class ServerDies(Trap):
    """Kills server-1 at something that the coordinator does, which goes on."""

    fleet: Fleet

    async def _spring(self, kill: Callable[[], None]) -> None:
        self.fired.set()
        self.fleet.keepers[1].die()


@pytest.mark.parametrize(("what", "nth", "when"), MOMENTS)
def test_another_server_takes_its_place(what: str, nth: int, when: str) -> None:
    trap = ServerDies(what, nth, when)
    with Fleet(places=("leader",), lease_s=2.0, trap=trap) as fleet:
        trap.fleet = fleet
        leader = fleet.begin(program())
        wait(trap.fired, f"{what} number {nth}")
        service = leader.service
        assert service is not None
        until(
            "it is missed",
            lambda: fleet.record().lost or service.job.reports.lost or not service.job.shards.infos()[1:],
        )
        fleet.serve(1, "new-server-1")
        summary = fleet.finish()
    calm(summary)
    assert summary["rollbacks"] <= 1


class WorkerDies(Trap):
    """Kills the worker that has uploaded version 0, and goes on when the coordinator has missed that worker."""

    fleet: Fleet
    left = 0

    async def _spring(self, kill: Callable[[], None]) -> None:
        self.fired.set()
        service = self.fleet.leader.service
        assert service is not None
        uploads = service.job.registry.initialiser
        for hand in self.fleet.hands:
            if hand.context is not None and hand.context.engine.member.session.member == uploads:
                hand.out.cut()
            else:
                self.left = hand.number
        while uploads in service.job.members:
            await asyncio.sleep(0.01)


# Each call is one of two; nothing is published, or one of two parts, or both.
@pytest.mark.parametrize(
    ("nth", "when"), [*(pytest.param(0, when, marks=pytest.mark.long) for when in ("before", "after")), (1, "after")]
)
def test_the_worker_that_uploads_dies(nth: int, when: str) -> None:
    trap = WorkerDies("call Shard.Activate", nth, when)
    with Fleet(places=("leader",), lease_s=2.0, trap=trap) as fleet:
        trap.fleet = fleet
        fleet.begin(program())
        wait(trap.fired, f"Shard.Activate number {nth}")
        summary = fleet.finish([fleet.hands[trap.left], fleet.work(program())])
        fleet.call(fleet.hands[1 - trap.left].out.heal)  # so that it hears of the end
    calm(summary)
    assert summary["rollbacks"] == 0
