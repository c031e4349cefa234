"""The coordinator dies together with servers, or while the job goes back: no timeline comes twice, same bits."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from paramserver.coordinator.leadership import takeover as taking
from paramserver.coordinator.rpc import sessions
from paramserver.worker.context import Context
from tests.support.cluster.harness import until
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import SLICES, program
from tests.support.cluster.taps import Trap
from tests.support.failover.held import lost_everything
from tests.support.failover.kills import Kills, exact
from tests.support.failover.ledger import BATCH, CELLS, PER_EPOCH
from tests.support.failover.moments import EVERY, fresh
from tests.support.failover.rollback import Rig, Strike, same, twin
from tests.support.marks import long_but


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever died with the leader is given up soon."""
    monkeypatch.setattr(taking, "_FIND_S", 1.0)
    monkeypatch.setattr(sessions, "_TICK_S", 0.05)


def went_well(rig: Rig) -> None:
    """To the end, with the same bits."""
    summary = rig.finish()
    assert rig.orders.timelines, "the job did not go back"
    same(summary, twin("faults", program(), slices_per_step=SLICES))


SERVER = Strike("apply.mid", "server-1", 5)
DEATHS: dict[str, list[Strike]] = {
    "with a server": [Strike("apply.mid", "server-1", 5, also=("leader",))],
    "with both servers (E24)": [Strike("apply.mid", "server-1", 5, also=("leader", "server-0"))],
    "before the timeline": [SERVER, Strike("coord.before_timeline", "leader")],
    "after the timeline": [SERVER, Strike("coord.after_timeline", "leader")],
    "after the timeline, three times": [SERVER, Strike("coord.after_timeline", "leader", times=3)],
    "while a server restores": [SERVER, Strike("restore.before_load", "server-0", also=("leader",))],
    "before the pointer": [Strike("ckpt.pointer", "leader", 3), SERVER],
    "before the manifest": [Strike("ckpt.manifest", "leader", 6), Strike("push.recv", "server-0", 7)],
    "at version 0": [Strike("ckpt.manifest", "leader", 0, also=("server-1",))],
}


SHORT = {
    "with both servers (E24)",
    "before the timeline",
    "while a server restores",
    "before the manifest",
    "at version 0",
}


@pytest.mark.parametrize("when", long_but(SHORT, DEATHS))
def test_it_dies(when: str, tmp_path: Path) -> None:
    strikes = fresh(DEATHS[when])
    with Rig(tmp_path, EVERY, strikes) as rig:
        rig.begin(program())
        went_well(rig)
        assert rig.deaths.count("leader") == sum(s.times for s in strikes if s.who == "leader" or "leader" in s.also)


BETWEEN = [
    pytest.param("call Shard.Restore", 0, "before", marks=pytest.mark.long),
    ("call Shard.Restore", 0, "between"),
    pytest.param("call Shard.Restore", 1, "after", marks=pytest.mark.long),
    # Two for version 0.
    pytest.param("call Shard.Activate", 2, "before", marks=pytest.mark.long),
    ("call Shard.Activate", 2, "between"),
    ("call Shard.Activate", 3, "after"),
]


@pytest.mark.parametrize(("what", "nth", "when"), BETWEEN)
def test_it_dies_between(what: str, nth: int, when: str, tmp_path: Path) -> None:
    """Some servers are on the new timeline, others are not; the one that stands by leads on."""
    trap = Trap(what, nth, when)
    with Rig(tmp_path, EVERY, fresh([SERVER]), places=("leader", "standby"), trap=trap) as rig:
        rig.begin(program())
        went_well(rig)
        assert trap.fired.is_set(), trap.seen
        assert [term for term, _ in rig.reigns] == [1, 2]


def test_the_store_has_forgotten_the_timeline(tmp_path: Path) -> None:
    """F06: it is written again, and another coordinator does not use its number once more."""
    killed = threading.Event()
    lock = threading.Lock()

    def each(ctx: Context, slices: int) -> None:
        with lock:
            if ctx.version == 6 and not killed.is_set():
                until("it is written again", lambda: {"state", "model"} <= set(rig.store.entries))
                rig.kill_now("server-0", "leader")
                killed.set()

    strikes = fresh([SERVER, Strike("coord.after_timeline", "leader")])
    with Rig(tmp_path, EVERY, strikes, lease_s=1.0) as rig:
        strikes[1].do = lambda: lost_everything(rig)
        rig.begin(program(each))
        went_well(rig)
        assert killed.is_set()
        assert {timeline for _, _, timeline, _ in rig.orders.timelines} == {1, 2}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_async_both_die_at_random_slices(seed: int, tmp_path: Path) -> None:
    chance, epochs = random.Random(seed), 4
    kills = Kills(
        (chance.randint(1, 45), ("leader", chance.choice(["server-0", "server-1"]))),
        (chance.randint(50, PER_EPOCH * epochs), ("server-0", "leader") if seed else ("leader",)),
    )
    with Rig(tmp_path, 10, mode="async", training__chunk_bytes=64) as rig:
        kills.rig = rig
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, kills))
        summary = rig.finish()
        exact(rig, summary, epochs)
        assert rig.rollbacks >= 1
    assert not kills.left
