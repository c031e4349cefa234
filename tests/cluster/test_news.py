"""News of members: who hears of them, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from paramserver.server.rpc.control import Control
from paramserver.v1 import shard_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import Died, until, wait
from tests.support.cluster.small_job import program
from tests.support.failover.held import Held
from tests.support.failover.takeover import Fleet

LEASE_S = 15.0


def test_a_server_that_hangs_holds_up_no_news() -> None:
    """Well before its lease ends, the others hear that a worker has died, and that another one has come."""
    held, there, dies = Held(), threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == 2 and ctx.rank == 1 and not dies.is_set():
            there.set()
            wait(dies, "the death of worker-1", 60.0)
            raise Died
        held(ctx, slices)

    with Fleet(places=("leader",), lease_s=LEASE_S) as fleet:
        leader = fleet.begin(program(each))
        wait(held.reached, "worker-0 in its third slice")
        wait(there, "worker-1 in its third slice")
        assert leader.service is not None
        hung = fleet.keepers[1]
        fleet.call(hung.process.pause)
        before = fleet.keepers[0].service.first.report().generation
        session = fleet.hands[0].context.engine.member.session  # type: ignore[union-attr]
        dies.set()
        soon_s = LEASE_S / 2
        until("worker-0 hears of it", lambda: [one.rank for one in session.view.workers] == [0], soon_s)
        until("server-0 hears of it", lambda: fleet.keepers[0].service.first.report().generation > before, soon_s)
        fleet.work(program(each))
        until("worker-0 hears of the newcomer", lambda: len(session.view.workers) == 2, soon_s)
        assert hung.process.held, "the server was asked, and hung"
        assert len(leader.service.job.shards.infos()) == 2, "it is not given up yet"
        fleet.call(hung.process.resume)
        held.released.set()
        fleet.finish([fleet.hands[0], fleet.hands[2]])


def test_a_server_that_hangs_and_a_worker_that_gets_nowhere_hold_up_no_news() -> None:
    """The hung server cannot be told of the stalled worker. The coordinator goes on watching."""
    there, dies = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == 2 and ctx.rank == 1:
            there.set()
            wait(dies, "the death of worker-1", 60.0)
            raise Died

    with Fleet(places=("leader",), lease_s=LEASE_S, mode="async", cluster__stall_s=1.0) as fleet:
        leader = fleet.begin(program(each))
        wait(there, "worker-1 in its third slice")
        assert leader.service is not None
        hung, stalls = fleet.keepers[1], leader.service.job.stalls
        fleet.call(hung.process.pause)
        until("a worker is found stalled", lambda: bool(stalls.members), LEASE_S / 2)
        session = fleet.hands[0].context.engine.member.session  # type: ignore[union-attr]
        dies.set()
        until("worker-0 hears of the death", lambda: [one.rank for one in session.view.workers] == [0], LEASE_S / 2)
        assert hung.process.held, "the server was asked, and hung"
        fleet.call(hung.process.resume)
        fleet.finish([fleet.hands[0]])


def test_a_coordinator_that_was_stopped_gives_nobody_up() -> None:
    """It was stopped for three leases, and could not hear what its members have sent meanwhile."""
    held, lease_s = Held(), 1.0
    with Fleet(places=("leader",), lease_s=lease_s) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.call(leader.process.pause)
        time.sleep(3 * lease_s)
        fleet.call(leader.process.resume)
        assert leader.process.held, "it was stopped"
        held.released.set()
        fleet.finish()
        assert fleet.record().losses == 0


def test_workers_follow_to_a_checkpoint_while_a_server_does_not_take_the_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers have restored. One of them answers nothing about members any more: workers go on nevertheless."""
    held, slow, real = Held(), threading.Event(), Control.set_members
    asked: list[int] = []

    async def set_members(self: Control, request: shard_pb2.SetMembersRequest) -> shard_pb2.SetMembersResponse:
        while slow.is_set() and request.timeline > 0:
            asked.append(request.timeline)
            await asyncio.sleep(0.01)
        return await real(self, request)

    monkeypatch.setattr(Control, "set_members", set_members)
    with Fleet(places=("leader",), checkpoint__dir=str(tmp_path / "ckpt"), checkpoint__every=1) as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        assert leader.service is not None
        slow.set()
        fleet.call(fleet.keepers[1].die)
        fleet.call(lambda: fleet.network.hang_up(fleet.keepers[1].process.out))
        fleet.serve(1)
        sessions = [hand.context.engine.member.session for hand in fleet.hands if hand.context]
        soon_s = LEASE_S / 2
        until("workers hear", lambda: all(one.view.timeline > 0 for one in sessions), soon_s)
        until("servers are asked", lambda: asked, soon_s)
        held.released.set()
        job = leader.service.job
        until("steps are made", lambda: job.reports.newest_version() > 3, soon_s)
        slow.clear()
        until("servers hear", lambda: not job.keeping.behind(), soon_s)
        fleet.finish()
