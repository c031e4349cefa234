"""A server dies before version 0 is published: nothing is lost yet, so the job needs no checkpoint to go on."""

from __future__ import annotations

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
            "it is missed", lambda: fleet.record().lost or service.job.reports.lost or not service.job.shard_infos()[1:]
        )
        fleet.serve(1, "new-server-1")
        summary = fleet.finish()
    calm(summary)
    assert summary["rollbacks"] <= 1
