"""The leader dies while it promotes backups: the next one goes on from the record, although servers have not heard."""

from __future__ import annotations

import pytest

from paramserver.coordinator.leadership import takeover as taking
from paramserver.membership import session
from tests.support.cluster.harness import until, wait
from tests.support.cluster.small_job import program
from tests.support.cluster.taps import Trap
from tests.support.failover.held import Held
from tests.support.failover.ledger import calm
from tests.support.failover.takeover import Fleet


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "_FIND_S", 1.0)
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_the_leader_is_killed_when_servers_are_to_hear_of_the_promotion(when: str) -> None:
    """The record names the new primary before that server knows. The server that is gone is no member any more."""
    held, trap = Held(), Trap("not yet", 0, when)
    with Fleet(servers=3, cluster__replicas=1, trap=trap) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        assert leader.service is not None
        holders = leader.service.job.holders
        until("all shards have backups", lambda: holders.replicated)
        trap.what = "call Shard.SetHolders"
        keeper = fleet.keepers[1]

        def kill() -> None:
            keeper.die()
            fleet.network.hang_up(keeper.process.out)

        fleet.call(kill)
        wait(trap.fired, "the leader's death at the first command to a server")
        held.released.set()
        service = fleet.took_over()
        assert 1 not in service.job.holders.primaries
        summary = fleet.finish()
    assert (summary["rollbacks"], summary["takeovers"]) == (0, 1)
    calm(summary)
