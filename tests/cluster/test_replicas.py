"""A server with backups dies: another server goes on with its shards, with the same bits, and nothing is done again."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.coordinator.work.replication import Replication
from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, network
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.kills import Kills, exact
from tests.support.failover.ledger import BATCH, CELLS
from tests.support.failover.moments import LAST, fresh
from tests.support.failover.rollback import Rig, Stop, Strike, same, twin
from tests.support.marks import long_but

STEP = 5
MOMENTS: dict[str, list[Strike]] = {
    "staged": [Strike("push.after_stage", "server-1", STEP)],
    "decided": [Strike("step.after_decide", "server-1", STEP)],
    "before it forwards": [Strike("forward.before", "server-1", STEP)],
    "half applied": [Strike("apply.mid", "server-1", STEP)],
    "before the answer of the backup": [Strike("forward.before_ack", "server-0", STEP)],
    "after the answer of the backup": [Strike("forward.after_ack", "server-0", STEP)],
    "before it publishes": [Strike("commit.before_log", "server-1", STEP)],
    "published, not answered": [Strike("commit.after_log_before_reply", "server-0", STEP)],
    "the backup has received": [Strike("forward.received", "server-0", STEP)],
    "first step": [Strike("push.recv", "server-1", 0)],
    "last step": [Strike("commit.before_log", "server-1", LAST)],
    "last version": [Strike("commit.after_log_before_reply", "server-1", LAST)],
    "with the leader": [Strike("apply.mid", "server-1", STEP, also=("leader",))],
    "before it is promoted": [Strike("apply.mid", "server-1", STEP), Strike("promote.before", "server-0")],
    "just promoted": [Strike("apply.mid", "server-1", STEP), Strike("promote.after", "server-0")],
}
# In these the second server dies before the first one has a copy again: there is no other way than back.
BACK = {"before it is promoted", "just promoted"}
SHORT = {
    "before it forwards",
    "before the answer of the backup",
    "before it publishes",
    "the backup has received",
    "last version",
    "with the leader",
    "just promoted",
}


def expected() -> Mapping[str, Any]:
    return twin("replicas", program(), slices_per_step=SLICES)


class WholeAgain:
    """At some versions, workers go on only when all shards have their backups."""

    def __init__(self, *versions: int) -> None:
        self.versions = versions
        self.rig: Rig | None = None

    def __call__(self, ctx: Context, slices: int) -> None:
        if ctx.version in self.versions:
            rig = self.rig
            assert rig is not None
            until("all shards have backups", lambda: whole(rig))


def whole(rig: Rig) -> bool:
    """Whether all shards have all of their backups."""
    held = rig.record().holders
    return bool(held) and all(any(one.whole for one in shard.backups) for shard in held)


@pytest.mark.parametrize("when", long_but(SHORT, MOMENTS))
def test_a_server_dies(when: str, tmp_path: Path) -> None:
    wanted = expected()
    with Rig(tmp_path, 0, fresh(MOMENTS[when]), cluster__replicas=1) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert (rig.rollbacks > 0) == (when in BACK)
        assert rig.record().promotions >= 1
    same(summary, wanted)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_one_server_dies_and_later_the_other(transport: str, tmp_path: Path) -> None:
    pause = WholeAgain(4)
    wanted = expected()
    strikes = [Strike("apply.mid", "server-0", 2), Strike("apply.mid", "server-1", 6)]
    with Rig(tmp_path, 0, strikes, cluster__replicas=1, cluster__transport=transport) as rig:
        pause.rig = rig
        rig.begin(program(pause))
        summary = rig.finish()
        assert rig.rollbacks == 0
        assert rig.record().promotions >= 2
    same(summary, wanted)


@pytest.mark.parametrize("replicas", long_but([2], [1, 2]))
def test_three_servers_of_which_one_dies(replicas: int, tmp_path: Path) -> None:
    wanted = expected()
    strikes = [Strike("forward.after_ack", "server-1", STEP)]
    with Rig(tmp_path, 0, strikes, servers=3, cluster__replicas=replicas) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert (rig.rollbacks, rig.record().promotions) == (0, 2)
    same(summary, wanted)


def clipping(ctx: Context, slices: int) -> None:
    ctx.clip_grad_norm(0.3)


@pytest.mark.parametrize("at", ["step.after_decide", "forward.before", "commit.after_log_before_reply"])
def test_a_norm_over_shards_one_of_which_moves(at: str, tmp_path: Path) -> None:
    """The new primary asks for norms that the others have told the former one."""
    script = Program(dataset(107), 8, 2, lambda: network(norm=True), adamw, each=clipping)
    wanted = twin("clipped", script, slices_per_step=SLICES)
    with Rig(tmp_path, 0, [Strike(at, "server-1", STEP)], cluster__replicas=1) as rig:
        rig.begin(script)
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, wanted)


@pytest.mark.parametrize(
    ("at", "transport"),
    [
        pytest.param(None, "shm", marks=pytest.mark.long),
        ("forward.before", "grpc"),
        ("forward.after_ack", "shm"),
        pytest.param("commit.after_log_before_reply", "grpc", marks=pytest.mark.long),
        pytest.param(None, "grpc", marks=pytest.mark.long),
        pytest.param("forward.before", "shm", marks=pytest.mark.long),
        pytest.param("forward.after_ack", "grpc", marks=pytest.mark.long),
        pytest.param("commit.after_log_before_reply", "shm", marks=pytest.mark.long),
    ],
)
def test_asynchronous_slices_count_once(at: str | None, transport: str, tmp_path: Path) -> None:
    epochs = 3
    kills = Kills((20, ("server-1",))) if at is None else None
    strikes = [] if at is None else [Strike(at, "server-1", 9)]
    options: dict[str, Any] = {"cluster__replicas": 1, "cluster__transport": transport, "mode": "async"}
    with Rig(tmp_path, 0, strikes, **options) as rig:
        if kills is not None:
            kills.rig = rig
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, each=kills))
        summary = rig.finish()
        exact(rig, summary, epochs)
        assert rig.rollbacks == 0
        assert rig.record().promotions >= 1


def test_checkpoints_go_on(tmp_path: Path) -> None:
    """A checkpoint for which a part is missing is given up, and later ones are made; the last one is whole."""
    wanted = expected()
    with Rig(tmp_path, 3, [Strike("commit.after_log_before_reply", "server-1", 2)], cluster__replicas=1) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks == 0
        assert rig.record().checkpoint == "step-00000008-t0"
    same(summary, wanted)


def test_all_copies_are_gone(tmp_path: Path) -> None:
    """Then the job goes back to a checkpoint, and has backups again."""
    wanted = expected()
    with Rig(tmp_path, 3, [Strike("apply.mid", "server-0", 5, also=("server-1",))], cluster__replicas=1) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks >= 1
    same(summary, wanted)


@pytest.mark.parametrize("who", ["server-0", "server-1", "leader"])
def test_a_death_while_a_backup_catches_up(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 1 dies, comes back and catches up; meanwhile its primary, itself, or the leader dies."""
    monkeypatch.setattr("paramserver.core.layout.catching_up.GROUP_BYTES", 600)  # a few chunks at a time
    wanted = expected()
    catching_up = Strike("catch_up.after_chunks", "server-0", nth=4, do=lambda: rig.strike(who))
    pause = WholeAgain(7)
    with Rig(tmp_path, 3, [Strike("apply.mid", "server-1", 3), catching_up], cluster__replicas=1) as rig:
        pause.rig = rig
        rig.begin(program(pause))
        summary = rig.finish()
        assert (rig.rollbacks > 0) == (who == "server-0")
    same(summary, wanted)


def test_a_server_is_drained_and_another_one_comes(tmp_path: Path) -> None:
    """The others take over its shards without a pause; a new server gets copies, and some of the shards back."""
    hold = Stop(2)
    wanted = expected()
    with Rig(tmp_path, 0, [], cluster__replicas=1) as rig:
        rig.begin(program(hold))
        wait(hold.reached, "the workers in step 2")
        rig.ask("Coordinator.Drain", coordinator_pb2.DrainRequest(name="server-1", wait_s=10.0))
        until("the server ends", lambda: rig.keepers[1].task.done())
        assert rig.keepers[1].task.result() is None, "it left in peace"
        assert {held.primary for held in rig.record().holders} == {0}
        rig.serve(1, "server-1-again")
        until(
            "each server is the primary of a shard", lambda: {held.primary for held in rig.record().holders} == {0, 1}
        )
        until("all shards have backups", lambda: whole(rig))
        hold.released.set()
        summary = rig.finish()
        assert (rig.rollbacks, rig.record().promotions) == (0, 0)
    same(summary, wanted)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_server_that_is_asked_to_leave_leaves_although_the_operator_and_the_leader_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_over: bool
) -> None:
    """It is marked before its shards move, and told when they have. Before, it stayed, and got no shards any more."""
    tell, released = Replication._tell, threading.Event()

    async def late(self: Replication, command: Any) -> None:
        if self.holders.retiring and not released.is_set():
            raise errors.UnavailableError("not now")
        await tell(self, command)

    monkeypatch.setattr(Replication, "_tell", late)
    hold = Stop(2)
    wanted = expected()
    with Rig(tmp_path, 0, [], cluster__replicas=1) as rig:
        rig.begin(program(hold))
        wait(hold.reached, "the workers in step 2")
        until("all shards have backups", lambda: whole(rig))
        with pytest.raises(errors.DeadlineError, match="server-1 was asked to leave"):
            rig.ask("Coordinator.Drain", coordinator_pb2.DrainRequest(name="server-1", wait_s=0.2))
        record = rig.record()
        server = next(one.member for one in record.members if one.address == rig.keepers[1].address)
        assert list(record.view.draining) == [server], "it is written down"
        assert not rig.keepers[1].task.done(), "it has its shards"
        if taken_over:
            rig.kill_now("leader")
            until("another one leads", lambda: len(rig.chiefs) == 2 and rig.chiefs[1].service is not None, 30.0)
        released.set()
        until("the server ends", rig.keepers[1].task.done, 30.0)
        assert rig.keepers[1].task.result() is None, "it left in peace"
        hold.released.set()
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, wanted)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"cluster__replicas": 0}, "no copy"),
        ({"cluster__replicas": 1}, "has left"),
    ],
)
def test_wishes_that_cannot_be(options: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    hold = Stop(2)
    with Rig(tmp_path, 0, [], **options) as rig:
        rig.begin(program(hold))
        wait(hold.reached, "the workers in step 2")
        request = coordinator_pb2.DrainRequest(name="server-1", wait_s=10.0)
        if refusal == "has left":
            rig.ask("Coordinator.Drain", request)
            request, refusal = coordinator_pb2.DrainRequest(name="server-0", wait_s=10.0), "no other server has a copy"
        with pytest.raises(errors.ConfigError, match=refusal):
            rig.ask("Coordinator.Drain", request)
        hold.released.set()
        rig.finish()
