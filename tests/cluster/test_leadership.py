"""Who leads: one at a time, whatever becomes of the store and of those who led before."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from paramserver import errors
from paramserver.membership import session
from paramserver.membership.settings import adopted
from paramserver.server.rpc.process import Process
from paramserver.store.base import Entry
from paramserver.transport.addresses import shard_address
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.cluster.harness import CALL_S, until, wait
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import program
from tests.support.failover.held import Held
from tests.support.failover.ledger import BATCH, CELLS, calm
from tests.support.failover.takeover import JOB, Chief, Fleet, Hand


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are short here, so members report more often."""
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


# ---- F02: a leader that was stopped and goes on


def paused_and_replaced(fleet: Fleet, leader: Chief) -> None:
    """Stop the leader for longer than its lease; keepalive breaks its connections, and the other one takes over."""
    fleet.call(leader.process.pause)
    fleet.call(fleet.network.line(leader.place).cut)
    fleet.took_over()


def gone_on(fleet: Fleet, leader: Chief) -> None:
    fleet.call(fleet.network.line(leader.place).heal)
    fleet.call(leader.process.resume)


def stopped(fleet: Fleet, held: Held) -> Chief:
    """Stop the leader for longer than its lease; keepalive breaks its connections, and the other one leads."""
    leader = fleet.begin(program(held))
    wait(held.reached, "the workers in their third slice")
    fleet.call(leader.process.pause)
    fleet.call(fleet.network.line(leader.place).cut)
    fleet.took_over()
    until("all servers follow the new one", lambda: [server.term for server in fleet.stats()] == [2, 2])
    assert leader.process.held > 0, "the first leader was stopped"
    return leader


def goes_on(fleet: Fleet, leader: Chief) -> None:
    """The first leader runs again, and can be reached."""
    fleet.call(fleet.network.line(leader.place).heal)
    fleet.call(leader.process.resume)


def late_commands(version: int) -> list[tuple[str, Any]]:
    """What the leader of term 1 had sent before it was stopped, and the network delivers now."""
    who = {"job": JOB, "term": 1, "generation": 1000}
    another = types_pb2.Consistency(mode=types_pb2.MODE_ASYNC, revision=1, from_version=version + 2)
    return [
        ("Shard.Configure", shard_pb2.ConfigureRequest(shards=2, **who)),  # type: ignore[arg-type]
        ("Shard.Activate", shard_pb2.ActivateRequest(timeline=1, **who)),  # type: ignore[arg-type]
        ("Shard.SetMembers", shard_pb2.SetMembersRequest(**who)),  # type: ignore[arg-type]
        (
            "Shard.SetConsistency",
            shard_pb2.SetConsistencyRequest(consistency=another, phase=shard_pb2.PHASE_PREPARE, **who),  # type: ignore[arg-type]
        ),
    ]


def deliver(fleet: Fleet, method: str, request: Any) -> None:
    """To both shards."""
    for keeper in fleet.keepers:
        address = shard_address(keeper.address, keeper.index)
        fleet.run(fleet.network.connect(address).call(method, request, timeout=CALL_S))


def test_f02_a_leader_that_was_stopped_is_not_obeyed() -> None:
    held = Held()
    with Fleet(lease_s=2.0) as fleet:
        leader = stopped(fleet, held)
        before = [server.generation for server in fleet.stats()]
        for method, request in late_commands(fleet.stats()[0].version):
            with pytest.raises(errors.FencedError, match=r"term 1\) has been replaced: server follows term 2"):
                deliver(fleet, method, request)
        assert [server.generation for server in fleet.stats()] == before
        goes_on(fleet, leader)
        until("it steps down", lambda: leader.service is None)
        with pytest.raises(errors.NotLeaderError, match="this coordinator"):
            fleet.ask("Coordinator.Stop", coordinator_pb2.StopRequest(), "leader")
        held.released.set()
        summary = fleet.finish()
    assert fleet.reigns == [(1, "leader"), (2, "standby")]
    calm(summary)


def test_without_the_check_of_terms_a_late_command_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Process, "check_authority", lambda self, request: None)
    held = Held()
    with Fleet(lease_s=2.0) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.kill(leader)
        fleet.took_over()
        deliver(fleet, *late_commands(fleet.stats()[0].version)[-1])
        held.released.set()

        def held_back() -> bool:
            return all(server.version + 1 == server.scheduled.from_version for server in fleet.stats())

        until("both shards wait at a boundary that nobody commits", held_back)
        assert not threading.Event().wait(0.5)
        assert held_back()


def test_f02_it_comes_back_while_the_others_train() -> None:
    held = Held()
    with Fleet(lease_s=2.0) as fleet:
        leader = stopped(fleet, held)
        held.released.set()
        goes_on(fleet, leader)
        until("it steps down", lambda: leader.service is None)
        summary = fleet.finish()
    assert fleet.reigns == [(1, "leader"), (2, "standby")]
    calm(summary)


# ---- the store


def lead_on(fleet: Fleet, leader: Chief, held: Held) -> None:
    """Let the job end; the leader led it all the time."""
    assert leader.service is not None
    held.released.set()
    summary = fleet.finish()
    assert fleet.reigns == [(1, "leader")]
    calm(summary)


def joined(fleet: Fleet) -> Hand:
    """One more worker, which makes a new membership."""
    hand = fleet.work(lambda ctx: None)
    until("a worker has joined", lambda: hand.context is not None or hand.error is not None)
    return hand


def recorded_generation(fleet: Fleet) -> int:
    return fleet.record().view.generation


def test_f03_the_store_is_away_and_comes_back() -> None:
    """Longer than the lease: nobody steps down, members come and go, and soon after all of it is written."""
    held = Held()
    with Fleet() as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        before = recorded_generation(fleet)
        fleet.cut_store(True)
        fleet.expire()
        away = time.monotonic()
        joined(fleet).join(CALL_S)
        service = leader.service
        assert service is not None
        while time.monotonic() < away + 2.0:
            assert leader.service is service
            assert fleet.chiefs[1].service is None
            time.sleep(0.05)
        assert service.job.members.generation > before == recorded_generation(fleet)
        assert 2 <= leader.store.refused <= 5 * 2 + 5, "it asks again, but at most five times a second"
        assert not service.job.reports.losses
        back = time.monotonic()
        fleet.cut_store(False)
        until("the state is written", lambda: recorded_generation(fleet) == service.job.members.generation, 2.0)
        assert time.monotonic() - back < 2.0
        assert [server.term for server in fleet.stats()] == [1, 1]
        lead_on(fleet, leader, held)


@pytest.mark.parametrize("how", ["empty", "older"])
def test_f06_a_store_that_forgets_is_written_again(how: str) -> None:
    """And the next leader takes the job over from that."""
    held = Held()
    with Fleet(lease_s=3.0) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        forget = fleet.store.remember() if how == "older" else fleet.store.forget
        joined(fleet).join(CALL_S)
        service = leader.service
        assert service is not None
        until("it is written", lambda: recorded_generation(fleet) == service.job.members.generation)
        fleet.call(forget)
        assert recorded_generation(fleet) < service.job.members.generation
        until("it is written again", lambda: recorded_generation(fleet) == service.job.members.generation)
        until("the model, too", lambda: "model" in fleet.store.entries)
        fleet.kill(leader)
        fleet.took_over()
        held.released.set()
        summary = fleet.finish()
    assert fleet.reigns == [(1, "leader"), (2, "standby")]
    calm(summary)


@pytest.mark.long
def test_f06_no_term_is_used_twice_although_the_store_has_forgotten_it() -> None:
    """The leader of term 2 dies, and the store comes back as it was in term 1: the servers know better."""
    held = Held()
    with Fleet(places=("leader", "standby", "third")) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        forget = fleet.store.remember()
        fleet.kill(leader)
        until("somebody else leads", lambda: len(fleet.reigns) == 2)
        until("the servers know", lambda: [server.term for server in fleet.stats()] == [2, 2])
        second = fleet.leader

        def both() -> None:
            second.die()
            forget()

        fleet.call(both)
        until("a third one leads", lambda: len(fleet.reigns) == 3)
        held.released.set()
        summary = fleet.finish()
    assert [term for term, _ in fleet.reigns] == [1, 2, 3]
    calm(summary)


def test_a_leader_that_alone_cannot_see_the_store_is_replaced() -> None:
    """It goes on in good faith until it hears of the other one; the servers obey the newer one only."""
    held = Held()
    with Fleet() as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        leader.store.cut = True
        fleet.expire()
        fleet.took_over()
        until("it steps down", lambda: leader.service is None)
        held.released.set()
        summary = fleet.finish()
    assert fleet.reigns == [(1, "leader"), (2, "standby")]
    calm(summary)


@pytest.mark.long
def test_f08_the_store_is_slow() -> None:
    """F08: a store that is slow by less than a third of the lease is no reason to step down."""
    held = Held()
    with Fleet(lease_s=3.0) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        leader.store.delay_s = 0.9
        assert not threading.Event().wait(4.0)
        assert leader.store.delayed > 2
        assert leader.service is not None
        lead_on(fleet, leader, held)


# ---- what an earlier coordinator has left


def left_behind(fleet: Fleet, held: Held) -> None:
    """A job in the middle of its steps whose only coordinator is dead."""
    leader = fleet.begin(program(held))
    wait(held.reached, "the workers in their third slice")
    fleet.kill(leader)


def all_die(fleet: Fleet, held: Held) -> None:
    """All workers."""
    held.doomed = True
    held.released.set()
    fleet.join()
    fleet.hands.clear()


def ends_with(chief: Chief) -> BaseException:
    until(f"{chief.place} ends", chief.task.done)
    error = chief.task.exception()
    assert error is not None
    return error


def test_f15_an_unfinished_job_is_not_taken_over_by_accident() -> None:
    held = Held()
    with Fleet(places=("leader",)) as fleet:
        left_behind(fleet, held)
        before = fleet.record()
        error = ends_with(fleet.coordinate("leader"))
        assert isinstance(error, errors.ConfigError)
        assert "has not ended, but the coordinator that led it (at leader) is gone" in str(error)
        assert "--resume" in str(error)
        assert "--fresh" in str(error)
        assert fleet.record() == before
        fleet.coordinate("leader", resume=True)
        held.released.set()
        summary = fleet.finish()
    calm(summary)


def test_f15_a_fresh_start_uses_no_number_of_before() -> None:
    held = Held()
    with Fleet(places=("leader",)) as fleet:
        left_behind(fleet, held)
        all_die(fleet, held)
        before = fleet.record()
        old = list(fleet.keepers)
        fresh = fleet.coordinate("leader", fresh=True)
        until("it leads", lambda: fresh.service is not None)
        until("the servers of before are sent away", lambda: all(keeper.task.done() for keeper in old))
        for keeper in old:
            with pytest.raises(errors.JobFailedError, match="this server holds a shard of an earlier run"):
                keeper.task.result()
        service = fresh.service
        assert service is not None
        assert service.job.timeline == before.view.timeline + 1
        assert service.job.members.generation > before.view.generation
        assert service.job.members.next_ident >= before.next_member
        fleet.keepers.clear()
        for index in range(2):
            fleet.serve(index, f"new-server-{index}")
        for _ in range(2):
            fleet.work(program())
        summary = fleet.finish()
    calm(summary)


def test_a_record_that_is_not_ours_is_left_alone() -> None:
    with Fleet(places=("leader",)) as fleet:
        fleet.store.put("state", Entry(b"{]", 1))
        error = ends_with(fleet.coordinate("leader", resume=True))
        assert isinstance(error, errors.StoreError)
        assert "did not write: use another job name" in str(error)
        assert fleet.store.entries["state"] == Entry(b"{]", 1)


def test_all_servers_have_begun_anew() -> None:
    """Nothing is left of the model: the job ends with that, and begins again when it is told to."""
    held = Held()
    with Fleet(places=("leader",)) as fleet:
        left_behind(fleet, held)
        all_die(fleet, held)
        for keeper in fleet.keepers:
            fleet.call(keeper.die)
        resumed = fleet.coordinate("leader", resume=True)
        fleet.serve(0, "new-server-0")
        fleet.serve(1, "new-server-1")
        until("it ends", resumed.task.done)
        assert resumed.task.result() == 1
        assert any("all servers have begun anew: the model is gone" in line for line in resumed.said)
        assert fleet.record().view.state == types_pb2.JOB_STATE_FAILED
        until("the new servers end", lambda: all(keeper.task.done() for keeper in fleet.keepers[2:]))
        del fleet.keepers[2:]
        fleet.coordinate("leader", fresh=True)
        fleet.serve(0, "newer-server-0")
        fleet.serve(1, "newer-server-1")
        for _ in range(2):
            fleet.work(program())
        summary = fleet.finish()
    calm(summary)


# ---- standing by


def test_one_that_stands_by_goes_home_when_the_job_is_done() -> None:
    with Fleet() as fleet:
        fleet.begin(program())
        calm(fleet.finish())
        standby = fleet.chiefs[1]
        until("it ends", standby.task.done)
        assert standby.task.result() == 0
        assert any("has ended" in line for line in standby.said)


def test_one_that_stands_by_with_fresh_goes_on_with_the_job() -> None:
    """To forget is for what was there at its start."""
    held = Held()
    with Fleet(places=("leader", "standby")) as fleet:
        leader = fleet.coordinate("leader")
        until("it leads", lambda: leader.service is not None)
        fleet.coordinate("standby", fresh=True)
        for index in range(2):
            fleet.serve(index)
        for _ in range(2):
            fleet.work(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.kill(leader)
        assert fleet.took_over().job.timeline == 0
        held.released.set()
        calm(fleet.finish())


def test_one_with_other_settings_leaves_the_job_alone() -> None:
    """It ends with the reason; the next one takes over."""
    held = Held()
    with Fleet(places=("leader", "standby")) as fleet:
        leader = fleet.coordinate("leader")
        until("it leads", lambda: leader.service is not None)
        other = fleet.coordinate("standby", {"training.seed": 5})
        until("it stands by", lambda: bool(other.said))
        for index in range(2):
            fleet.serve(index)
        for _ in range(2):
            fleet.work(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.kill(leader)
        error = ends_with(other)
        assert isinstance(error, errors.ConfigError)
        assert "training.seed is 5 here, the job has 0" in str(error)
        assert fleet.record().view.state == types_pb2.JOB_STATE_RUNNING
        fleet.coordinate("leader", resume=True)
        held.released.set()
        calm(fleet.finish())


def test_two_leaders_on_one_machine_without_standing_by() -> None:
    with Fleet(places=("leader",)) as fleet:
        fleet.begin()
        fleet.places.append("second")
        error = ends_with(fleet.coordinate("second", standby=False))
        assert isinstance(error, errors.ConfigError)
        assert "is led by a coordinator at leader already" in str(error)


def test_one_that_stands_by_says_who_leads() -> None:
    with Fleet() as fleet:
        fleet.begin()
        until("it stands by", lambda: bool(fleet.chiefs[1].said))
        status = fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest(), "standby")
        assert status.term == 0
        assert status.reason == "this coordinator stands by for the one at leader"
        assert fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest(), "leader").term == 1
        with pytest.raises(errors.NotLeaderError, match="stands by for the one at leader"):
            fleet.ask("Coordinator.Settings", coordinator_pb2.SettingsRequest(), "standby")


# ---- the end


def test_joining_a_job_that_is_done() -> None:
    with Fleet(places=("leader",), cluster__when_done="stay") as fleet:
        leader = fleet.begin(LedgerProgram(CELLS, BATCH, 1))
        fleet.join()
        until("the job is done", lambda: fleet.record().view.state == types_pb2.JOB_STATE_DONE)
        with pytest.raises(errors.EndedError, match="there is nothing left to do: job 'test' has ended"):
            fleet.context(Hand(fleet, 9, lambda ctx: None, None))
        assert not leader.task.done(), "it stays, as it was told"
        assert all(not keeper.task.done() for keeper in fleet.keepers)
        fleet.call(lambda: leader.coordinating.on_signal(signal.SIGTERM))
        until("it ends when asked", leader.task.done)


def test_settings_come_from_the_coordinator() -> None:
    with Fleet(places=("leader",), training__seed=7) as fleet:
        fleet.begin()
        theirs = fleet.ask("Coordinator.Settings", coordinator_pb2.SettingsRequest()).settings
        taken = adopted(fleet.settings.__class__(), dict(theirs))
        assert taken["training.seed"] == "7"
        assert taken["cluster.job"] == "test"
