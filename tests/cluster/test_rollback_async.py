"""Servers die during asynchronous training, and while the mode changes: every sample of every epoch counts once."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from paramserver import errors
from paramserver.coordinator.rpc import sessions
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.cluster.harness import until, wait
from tests.support.cluster.pacer import Pacer
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.taps import Trap
from tests.support.failover.held import Held
from tests.support.failover.kills import Kills, exact
from tests.support.failover.ledger import BATCH, CELLS, PER_EPOCH
from tests.support.failover.moments import fresh
from tests.support.failover.rollback import Rig, Strike
from tests.support.marks import long_but

EVERY = 10


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """These jobs last a second: the coordinator looks more often whether a checkpoint is due."""
    monkeypatch.setattr(sessions, "_TICK_S", 0.02)


def random_kills(chance: random.Random, slices: int) -> Kills:
    names = ("server-0", "server-1")
    return Kills(
        *(
            (chance.randint(1, slices), names if chance.random() < 0.25 else (chance.choice(names),))
            for _ in range(chance.randint(1, 3))
        )
    )


@pytest.mark.parametrize("seed", long_but([0], range(4)))
def test_servers_die_at_random_slices(seed: int, tmp_path: Path) -> None:
    """D09, D13, G14."""
    chance = random.Random(seed)
    epochs, staleness = 4, chance.choice([0, 1, 3])
    kills = random_kills(chance, PER_EPOCH * epochs)
    with Rig(
        tmp_path, EVERY, mode="async", staleness=staleness, workers=chance.randint(1, 3), training__chunk_bytes=64
    ) as rig:
        kills.rig = rig
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, kills))
        summary = rig.finish()
        assert rig.rollbacks >= 1, f"seed {seed}"
        exact(rig, summary, epochs)
    assert not kills.left, f"seed {seed}: a kill never came"
    assert summary["max_clock_spread"] <= staleness
    assert summary["mode"] == "async"


PLACES = {
    "staged": [Strike("push.after_stage", "server-1", nth=30)],
    "applied": [Strike("apply.mid", "server-0", nth=30)],
    "published": [Strike("commit.after_log_before_reply", "server-1", nth=30)],
    "while it restores": [Strike("apply.mid", "server-0", nth=30), Strike("restore.after_load", "server-0", times=2)],
    # Two files for version 0, and two for the first that is written later, at the latest when all is done.
    "a file is opened": [Strike("ckpt.tmp_open", "server-1", nth=2)],
    "a checkpoint is written": [Strike("ckpt.before_rename", "server-0", nth=3, also=("server-1",))],
    "before version 0": [Strike("ckpt.before_fsync", "server-1", 0)],
}


# The synchronous tests of going back strike at these places, too.
_LONG = ("applied", "published", "a file is opened")


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=pytest.mark.long) if where in _LONG else where for where in PLACES]
)
def test_servers_die_at(where: str, tmp_path: Path) -> None:
    epochs = 4
    with Rig(tmp_path, EVERY, fresh(PLACES[where]), mode="async", training__chunk_bytes=64) as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, epochs))
        summary = rig.finish()
        assert rig.rollbacks >= 1
        exact(rig, summary, epochs)


def test_a_request_of_the_old_timeline_has_no_effect(tmp_path: Path) -> None:
    """What was done there is undone, so saying that it is done must not count."""
    held, epochs = Held(), 2
    with Rig(tmp_path, EVERY, mode="async", training__chunk_bytes=64) as rig:
        leader = rig.begin(LedgerProgram(CELLS, BATCH, epochs, held))
        wait(held.reached, "the workers in their third slice")
        rig.kill_now("server-1")
        until("the job went back", lambda: rig.rollbacks == 1)
        service = leader.service
        assert service is not None
        done = [shard_pb2.AsyncName(epoch=0, index=index) for index in range(PER_EPOCH)]
        for member in service.job.worker_infos():
            request = coordinator_pb2.LeaseRequest(
                member=member.member,
                max_epoch=1,
                want=4,
                done=done,
                timeline=0,
                revision=service.job.consistency.revision,
            )
            with pytest.raises(errors.RolledBackError, match="timeline 1"):
                rig.ask("Coordinator.Lease", request)
        assert service.job.leasing.table is not None
        assert service.job.leasing.table.position()[0] == 0, "epoch 0 is not done"
        held.released.set()
        exact(rig, rig.finish(), epochs)


# ---- the mode changes, and the checkpoint is of before


@pytest.mark.parametrize(
    ("every", "start"),
    [
        (0, "async"),
        pytest.param(EVERY, "sync", marks=pytest.mark.long),
        pytest.param(0, "sync", marks=pytest.mark.long),
        pytest.param(EVERY, "async", marks=pytest.mark.long),
    ],
)
def test_the_setting_is_brought_back(start: str, every: int, tmp_path: Path) -> None:
    """With 0 there is only the checkpoint of version 0."""
    other, epochs, pacer = "async" if start == "sync" else "sync", 6, Pacer()
    with Rig(tmp_path, every, mode=start, slices_per_step=1, training__chunk_bytes=64) as rig:
        leader = rig.begin(LedgerProgram(CELLS, BATCH, epochs, pacer))
        pacer.go(31)
        pacer.free()
        rig.change_mode(other)
        rig.kill_now("server-0")
        until("the job went back", lambda: rig.rollbacks == 1)
        summary = rig.finish()
        exact(rig, summary, epochs)
        assert leader.service is None
    assert summary["mode"] == other


@pytest.mark.parametrize(
    ("start", "what"),
    [
        ("sync", "call Shard.SetConsistency PREPARE"),
        pytest.param("async", "call Shard.SetConsistency PREPARE", marks=pytest.mark.long),
        ("async", "call Shard.Activate"),
    ],
)
def test_another_coordinator_brings_the_setting_back(start: str, what: str, tmp_path: Path) -> None:
    """The leader dies when it is about to do so, or before it has written down that the job went back."""
    other, epochs, pacer, trap = "async" if start == "sync" else "sync", 6, Pacer(), Trap("nothing yet", 1, "after")
    places = ("leader", "standby")
    with Rig(tmp_path, 0, places=places, mode=start, slices_per_step=1, training__chunk_bytes=64, trap=trap) as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, pacer))
        pacer.go(31)
        pacer.free()
        rig.change_mode(other)
        trap.what = what
        rig.kill_now("server-0")
        wait(trap.fired, "the leader's death")
        summary = rig.finish()
        exact(rig, summary, epochs)
        assert len(rig.reigns) == 2
    assert summary["mode"] == other


def test_a_change_that_is_agreed_on_survives_a_roll_back(tmp_path: Path) -> None:
    """It belongs to a version of the old timeline; on the new one the shards know nothing of it, so it is made anew."""
    epochs, pacer, told, trap = 4, Pacer(), [], Trap("nothing")
    with Rig(tmp_path, EVERY, slices_per_step=1, training__chunk_bytes=64, trap=trap) as rig:
        leader = rig.begin(LedgerProgram(CELLS, BATCH, epochs, pacer))
        pacer.go(14)  # the workers stand, so the boundary is not reached

        def ask() -> None:
            request = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC, wait_s=60.0)
            try:
                rig.ask("Coordinator.SetConsistency", request, place=leader.place)
            except errors.UnavailableError as error:
                told.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        until("the change is agreed on", lambda: "call Shard.SetConsistency COMMIT" in trap.seen)
        rig.kill_now("server-1")
        until("the job went back", lambda: rig.rollbacks == 1)
        asking.join(30.0)
        assert told
        assert "interrupted" in told[0]
        pacer.free()
        summary = rig.finish()
        exact(rig, summary, epochs)
    assert summary["mode"] == "async"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_servers_die_while_the_mode_changes(seed: int, tmp_path: Path) -> None:
    """To and fro; a change that fails since the job goes back may be asked for again."""
    chance, epochs, pacer = random.Random(seed), 8, Pacer()
    with Rig(tmp_path, EVERY, slices_per_step=1, training__chunk_bytes=64) as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, pacer))
        modes = ["async", "sync", "async"]
        for number, mode in enumerate(modes, 1):
            pacer.go(chance.randint(5, 40))
            pacer.free()
            killer = threading.Timer(chance.random() * 0.05, rig.kill_now, [chance.choice(["server-0", "server-1"])])
            killer.start()
            insist(rig, mode)
            killer.join()
            until("the job went back", lambda number=number: rig.rollbacks >= number)  # type: ignore[misc]
        summary = rig.finish()
        exact(rig, summary, epochs)


def insist(rig: Rig, mode: str) -> None:
    """Ask for a mode until it is agreed on."""

    def asked() -> bool:
        try:
            rig.change_mode(mode)
        except (errors.RetryableError, errors.FencedError):
            return False
        return True

    until(f"the mode is {mode}", asked)
