"""Servers that are cut off: they come back with their shard, or the job says whom it misses."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable

import pytest
import torch

from paramserver import errors
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.core.job.membership import Member, Role
from paramserver.core.job.seats import Away
from paramserver.membership import session
from paramserver.server.service import ServerService
from paramserver.transport.memory import MemoryNetwork
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import PROTOCOL
from paramserver.worker.context import Context
from tests.support.cluster.faults import Fault, Rule
from tests.support.cluster.harness import Died, recorded, until, wait
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import program, twin
from tests.support.cluster.taps import Trap
from tests.support.failover.held import Held
from tests.support.failover.ledger import BATCH, CELLS, calm, change_once, counted_once
from tests.support.failover.takeover import Fleet


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are short here, so members report more often."""
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


def given_up(fleet: Fleet) -> bool:
    """The leader has lost server-1."""
    return any(isinstance(c.service.job.seats.seat(1), Away) for c in fleet.chiefs if c.service is not None)


def back(fleet: Fleet) -> bool:
    """The leader has both servers, or the job has come to its end with them."""
    services = [chief.service for chief in fleet.chiefs if chief.service is not None and not chief.process.killed]
    return not services or (not services[0].job.seats.away and len(services[0].job.shards.infos()) == 2)


def cut_off(fleet: Fleet, from_everybody: bool) -> None:
    """Cut server-1 off until the leader has given it up."""
    keeper = fleet.keepers[1]
    fleet.call(keeper.cut if from_everybody else keeper.process.out.cut)
    until("server-1 is given up", lambda: given_up(fleet))


@pytest.mark.parametrize("from_everybody", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_f18_cut_off_for_longer_than_its_lease(mode: str, from_everybody: bool) -> None:
    """From everybody, the workers wait for it; from the coordinator only, they go on."""
    held = Held()
    script = program(held) if mode == "sync" else LedgerProgram(CELLS, BATCH, 2, held)
    with recorded() as log, Fleet(mode=mode, lease_s=1.0, places=("leader",)) as fleet:
        fleet.begin(script)
        wait(held.reached, "the workers in their third slice")
        cut_off(fleet, from_everybody)
        until("that is written", lambda: list(fleet.record().lost) == ["server-1"])
        held.released.set()
        if not from_everybody:
            fleet_versions = fleet.stats()[1].version
            until("training goes on", lambda: fleet.stats()[1].version > fleet_versions + 1)
        fleet.call(fleet.keepers[1].heal)
        until("it is back", lambda: back(fleet))
        summary = fleet.finish()
    if mode == "sync":
        calm(summary)
    else:
        counted_once(log, 2)


def test_it_comes_back_before_the_channel_to_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seat is kept from the moment of the loss."""
    forget, is_back = Servers.forget, threading.Event()

    async def late(self: Servers, ident: int) -> None:
        while not is_back.is_set():
            await asyncio.sleep(0.02)
        await forget(self, ident)

    monkeypatch.setattr(Servers, "forget", late)
    held = Held()
    with Fleet(lease_s=1.0, places=("leader",)) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.call(fleet.keepers[1].cut)
        assert leader.service is not None
        job = leader.service.job
        until("server-1 is no member", lambda: len(job.shards.infos()) == 1)
        fleet.call(fleet.keepers[1].heal)
        until("it is back", lambda: len(job.shards.infos()) == 2)
        is_back.set()
        held.released.set()
        calm(fleet.finish())


def test_a_leader_that_takes_over_waits_for_it_too() -> None:
    """It was away already when the first leader died."""
    held = Held()
    with Fleet(lease_s=1.0) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        cut_off(fleet, True)
        until("that is written", lambda: list(fleet.record().lost) == ["server-1"])
        fleet.kill(leader)
        standby = fleet.chiefs[1].coordinating
        until("the standby takes over", lambda: standby.endpoint.doing == "takes the job over")
        fleet.call(fleet.keepers[1].heal)
        fleet.took_over()
        until("it is a member again", lambda: back(fleet))
        held.released.set()
        summary = fleet.finish()
    assert [term for term, _ in fleet.reigns] == [1, 2]
    calm(summary)


@pytest.mark.long
def test_it_begins_anew_without_its_shard() -> None:
    held = Held()
    with Fleet(lease_s=1.0, places=("leader",)) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.call(fleet.keepers[1].die)
        until("server-1 is given up", lambda: given_up(fleet))
        again = fleet.serve(1)
        held.released.set()
        until("the coordinator ends", leader.task.done)
        reason = (
            "a server has come without a shard in place of server-1; that shard of the model is gone "
            "(set checkpoint.dir, so that the job can go back to a checkpoint)"
        )
        assert leader.task.result() == 1
        assert reason in leader.said[-1]
        until("the server ends", again.task.done)
        with pytest.raises(errors.JobFailedError, match=re.escape(reason)):
            again.task.result()
        with pytest.raises(errors.JobFailedError, match=re.escape(reason)):
            fleet.join()
        assert fleet.record().view.state == types_pb2.JOB_STATE_FAILED
        assert fleet.record().view.reason == reason


@pytest.mark.long
def test_it_is_gone_for_too_long() -> None:
    held = Held()
    with Fleet(lease_s=1.0, max_idle_s=1.0, places=("leader",)) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.call(fleet.keepers[1].die)
        until("the coordinator ends", leader.task.done)
        assert leader.task.result() == 1
        reason = "server-1 at server-1 has been gone for 1 s (cluster.max_idle_s); its shard of the model is gone"
        assert fleet.record().view.reason == reason
        held.released.set()
        with pytest.raises(errors.JobFailedError, match="server-1 at server-1 has been gone for 1 s"):
            fleet.join()


def test_a_server_of_another_run_is_sent_away() -> None:
    """It is none of those that are missed, or its shard is not the one they had."""
    held = Held()
    with Fleet(lease_s=1.0, places=("leader",)) as fleet:
        fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        cut_off(fleet, True)
        missed = fleet.keepers[1].member.session.incarnation
        digest, _ = fleet.keepers[1].service.holding()
        for incarnation, holds, timeline in [(5, digest, 0), (missed, "another", 0), (missed, digest, 1)]:
            request = coordinator_pb2.JoinRequest(
                role=types_pb2.ROLE_SERVER,
                protocol=PROTOCOL,
                address="server-0",
                incarnation=incarnation,
                holds=holds,
                timeline=timeline,
            )
            with pytest.raises(errors.JobFailedError, match="holds a shard of an earlier run of job 'test'"):
                fleet.ask("Coordinator.Join", request)
        fleet.call(fleet.keepers[1].heal)
        until("the real one is back", lambda: back(fleet))
        held.released.set()
        calm(fleet.finish())


def test_the_answer_to_its_request_to_join_is_lost() -> None:
    """It asks again, and is not one too many."""
    held = Held()
    plan = [Rule("Coordinator.Join", Fault.LOSE_REPLY, times=2)]
    with Fleet(places=("leader",)) as fleet:
        leader = fleet.coordinate("leader")
        fleet.serve(0)
        late = fleet.serve(1, plan=plan)
        for _ in range(2):
            fleet.work(program(held))
        wait(held.reached, "the workers in their third slice")
        late.process.out.check()
        until("it knows that it is a member", lambda: bool(late.member.session.member))
        assert leader.service is not None
        assert [shard.server for shard in leader.service.job.shards.infos()] == ["server-0", "server-1"]
        held.released.set()
        calm(fleet.finish())


# ---- changes of the mode


def test_no_change_is_begun_while_a_server_is_away() -> None:
    held = Held()
    with Fleet(lease_s=1.0, places=("leader",)) as fleet:
        fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        cut_off(fleet, from_everybody=False)
        assert "server-1 cannot be reached now: try again later" in change_once(fleet, "async")
        fleet.call(fleet.keepers[1].heal)
        until("it is back", lambda: back(fleet))
        held.released.set()
        calm(fleet.finish())


def test_a_change_that_a_server_did_not_hear_the_end_of() -> None:
    """Prepared there, given up meanwhile: it is told when it comes back, and lets the boundary pass."""
    held = Held()
    with Fleet(lease_s=1.0, places=("leader",)) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        keeper = fleet.keepers[1]
        real = keeper.service.first.set_consistency

        async def deaf(request: object) -> object:
            reply = await real(request)  # type: ignore[arg-type]
            keeper.cut()
            return reply

        keeper.service.first.set_consistency = deaf  # type: ignore[assignment]
        network = fleet.network
        fleet.call(lambda: network.kill(keeper.address))
        fleet.call(lambda: network.serve_in(keeper.process, keeper.address, [("Shard", keeper.service)]))
        assert change_once(fleet, "async")
        until("server-1 is given up", lambda: given_up(fleet))
        assert keeper.service.first.report().HasField("scheduled")
        keeper.service.first.set_consistency = real
        fleet.call(lambda: network.kill(keeper.address))
        fleet.call(lambda: network.serve_in(keeper.process, keeper.address, [("Shard", keeper.service)]))
        fleet.call(keeper.heal)
        until("it is back", lambda: back(fleet))
        until("it has forgotten the change", lambda: not keeper.service.first.report().HasField("scheduled"))
        held.released.set()
        summary = fleet.finish()
        assert leader.task.result() == 0
    assert summary["mode"] == "sync"
    calm(summary)


class CutOff(Trap):
    """Cuts server-1 off, where a `Trap` kills the leader."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.fleet: Fleet | None = None

    async def _spring(self, kill: Callable[[], None]) -> None:
        assert self.fleet is not None
        self.fleet.keepers[1].cut()
        self.fired.set()


@pytest.mark.parametrize("forgetting_s", [0.0, 1.5])
def test_a_change_that_was_agreed_waits_for_a_server(forgetting_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off before it hears of the commitment; when it is back it does, and the job goes on in the new mode.

    ``forgetting_s``: seconds that the coordinator needs to close the channel of the server, which is no member by then.
    """
    forget = Servers.forget

    async def slowly(self: Servers, ident: int) -> None:
        await asyncio.sleep(forgetting_s)
        await forget(self, ident)

    monkeypatch.setattr(Servers, "forget", slowly)
    epochs, held, trap = 3, Held(), CutOff("call Shard.SetConsistency COMMIT")
    with recorded() as log, Fleet(lease_s=1.0, slices_per_step=2, places=("leader",), trap=trap) as fleet:
        trap.fleet = fleet
        fleet.begin(LedgerProgram(CELLS, BATCH, epochs, held))
        wait(held.reached, "the workers in their third slice")
        replies: list[str] = []
        change = threading.Thread(target=lambda: replies.append(change_once(fleet, "async")), daemon=True)
        change.start()
        wait(trap.fired, "the cut")
        until("server-1 is given up", lambda: given_up(fleet))
        held.released.set()
        fleet.call(fleet.keepers[1].heal)
        until("it is back", lambda: back(fleet))
        change.join(20.0)
        assert replies == [""]
        summary = fleet.finish()
    counted_once(log, epochs)
    assert summary["mode"] == "async"


# ---- workers


def test_b06_all_workers_die_and_nobody_comes() -> None:
    held = Held()
    with Fleet(lease_s=1.0, max_idle_s=0.5, places=("leader",)) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        held.doomed = True
        held.released.set()
        until("the coordinator ends", leader.task.done)
        assert leader.task.result() == 1
        assert fleet.record().view.reason == "no worker has come for 0.5 s (cluster.max_idle_s)"


def test_b06_all_workers_die_and_one_returns() -> None:
    """The servers keep the model; the newcomer goes on where the others stood."""
    held = Held()
    with Fleet(lease_s=1.0, places=("leader",)) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        held.doomed = True
        held.released.set()
        until("all are gone", lambda: leader.service is not None and not leader.service.job.worker_infos())
        until("they are dead", lambda: not any(hand.alive for hand in fleet.hands))
        fleet.hands.clear()
        fleet.work(program())
        summary = fleet.finish()
    assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == twin()


def test_all_workers_die_before_version_0() -> None:
    """The same limit holds while the job is being set up."""

    def die(ctx: Context) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def started(*_: object, **__: object) -> None:
            raise Died

        ctx.engine.shards.use = started  # type: ignore[method-assign]
        ctx.prepare(model, optimizer)

    with Fleet(workers=1, lease_s=1.0, max_idle_s=0.5, places=("leader",)) as fleet:
        leader = fleet.begin(die)
        until("the coordinator ends", leader.task.done)
        assert leader.task.result() == 1
        assert fleet.record().view.reason == "no worker has come for 0.5 s (cluster.max_idle_s)"
        assert fleet.record().layout, "the model was there already"


def test_a_process_that_has_not_joined_is_not_given_the_shard_of_the_one_before() -> None:
    """It is at the same address, as under Docker. With a shard it would be a stranger when it joins."""

    async def go() -> None:
        network = MemoryNetwork()
        service = ServerService("job", network.connect)
        service.process.becomes_member(2, lambda: None)
        server = network.serve("server-0", [("Shard", service)])
        former = Member(1, Role.SERVER, 0, "server-0", 0.0, address="server-0", incarnation=1)
        servers = Servers(network.connect)
        for method, request in (
            ("Shard.Configure", shard_pb2.ConfigureRequest(job="job")),
            ("Shard.Restore", shard_pb2.RestoreRequest(configure=shard_pb2.ConfigureRequest(job="job"))),
        ):
            with pytest.raises(errors.UnavailableError, match="has not joined yet"):
                await servers.call(former, 0, method, request, 5.0)
        assert service.holding() == ("", 0)
        await servers.close()
        await service.close()
        server.abort()

    asyncio.run(go())
