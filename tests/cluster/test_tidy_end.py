"""What a coordinator leaves in the store when it ends: where the job stands, and nothing that nobody needs."""

from __future__ import annotations

import signal

from paramserver.v1 import types_pb2
from tests.support.cluster.harness import until
from tests.support.cluster.programs import LedgerProgram
from tests.support.failover.takeover import Fleet


def test_k05_the_model_is_forgotten_although_servers_leave_before_the_coordinator_is_told_to_end() -> None:
    """A launcher ends servers and coordinator at once, and on a busy machine the servers are faster."""
    with Fleet(places=("leader",), workers=1) as fleet:
        leader = fleet.coordinate("leader", gather=False, standby=False)
        until("it leads", lambda: leader.service is not None)
        for index in range(2):
            fleet.serve(index)
        fleet.work(LedgerProgram(48, 2, 1))
        fleet.join()
        service = leader.service
        assert service is not None
        until("the workers are through", service.job.over.done)
        assert "model" in fleet.store.entries
        for keeper in fleet.keepers:
            fleet.call(keeper.stop.set)
        until("the servers have left", lambda: not service.job.shards.infos())
        fleet.call(lambda: leader.coordinating.on_signal(signal.SIGTERM))
        until("the coordinator ends", leader.task.done)
        assert leader.task.result() == 128 + signal.SIGTERM
        assert set(fleet.store.entries) == {"state"}
        assert fleet.record().view.state == types_pb2.JOB_STATE_DONE
