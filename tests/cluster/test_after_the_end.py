"""The leader dies when the job is done, before everybody has left: the one that stands by does not begin it again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from paramserver.roles import coordinating
from paramserver.v1 import types_pb2
from tests.support.cluster.harness import until, wait
from tests.support.cluster.small_job import program
from tests.support.cluster.taps import Trap
from tests.support.failover.ledger import calm
from tests.support.failover.takeover import Fleet


class StopsServer(Trap):
    """Stops a server when the end of the job is about to be written, and kills the leader when it forgets the model.

    The one that stands by does not reach the store from then on.
    """

    def __init__(self) -> None:
        super().__init__("store delete model", 0, "after")
        self.fleet: Fleet | None = None
        self.stopped = False

    async def before(self, what: str, kill: Callable[[], None]) -> int:
        """See `Trap`."""
        assert self.fleet is not None
        service = self.fleet.chiefs[0].service if self.fleet.chiefs else None
        if what == "store save state" and service is not None and service.job.life.final and not self.stopped:
            self.stopped = True
            self.fleet.keepers[1].process.pause()
        return await super().before(what, kill)

    async def _spring(self, kill: Callable[[], None]) -> None:
        assert self.fleet is not None
        self.fleet.chiefs[1].store.cut = True
        await super()._spring(kill)


@pytest.mark.parametrize("server", ["stays", "dies"])
def test_a_job_that_is_done_is_not_taken_over(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has not heard of the end still has a record of a job that runs, and looks for a coordinator."""
    monkeypatch.setattr(coordinating, "_LEAVE_S", 0.5)
    trap = StopsServer()
    with Fleet(lease_s=1.0, max_idle_s=3.0, trap=trap) as fleet:
        trap.fleet = fleet
        fleet.begin(program())
        fleet.join()
        wait(trap.fired, "the leader is dead")
        standby = fleet.chiefs[1]
        keeper = fleet.keepers[1]
        fleet.call(keeper.process.resume)
        until("the server looks for a coordinator", standby.coordinating.endpoint.holders)
        if server == "dies":
            fleet.call(keeper.die)
        standby.store.cut = False
        until("the standby ends", standby.task.done)
        assert standby.task.result() == 0
        assert any("has ended" in line for line in standby.said)
        assert fleet.record().view.state == types_pb2.JOB_STATE_DONE
    assert trap.stopped
    assert fleet.reigns == [(1, "leader")]
    calm(json.loads(fleet.record().summary))
