"""Anybody dies at any time: seeded schedules of kills. PARAMSERVER_TEST_SEEDS="0-200" runs so many others."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from paramserver.coordinator.leadership import takeover as taking
from paramserver.coordinator.rpc import sessions
from paramserver.worker.context import Context
from tests.support.cluster.harness import Died
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH, CELLS, PER_EPOCH
from tests.support.failover.rollback import Rig, Strike, same, twin

PLACES = (
    "push.recv",
    "push.after_stage",
    "step.before_decide",
    "step.after_decide",
    "apply.mid",
    "apply.after_weights_before_opt",
    "commit.before_log",
    "commit.after_log_before_reply",
    "reply.drop",
    "ckpt.tmp_open",
    "ckpt.mid_write",
    "ckpt.before_rename",
    "ckpt.shard_done",
    "restore.before_load",
    "restore.after_load",
)
LEADS = ("ckpt.manifest", "ckpt.pointer", "coord.before_timeline", "coord.after_timeline", "coord.after_generation")
# By turns, from seed to seed.
TRANSPORTS = ("grpc", "shm")


def seeds() -> list[int]:
    """A few, or those that the environment says."""
    first, _, last = os.environ.get("PARAMSERVER_TEST_SEEDS", "0-3").partition("-")
    return list(range(int(first), int(last or first) + 1))


# The first ones with every `make test`, all of them with `make test-long`.
SEEDS = [*seeds()[:1], *(pytest.param(seed, marks=pytest.mark.long) for seed in seeds()[1:])]


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "_FIND_S", 1.0)
    monkeypatch.setattr(sessions, "_TICK_S", 0.05)


def planned(chance: random.Random) -> list[Strike]:
    """Two to four deaths of servers and coordinators; those at places that are never reached do no harm."""
    strikes = [Strike("commit.before_log", f"server-{chance.randint(0, 1)}", nth=chance.randint(0, 6))]
    for _ in range(chance.randint(1, 3)):
        who = chance.choice(("server-0", "server-1", "leader"))
        at = chance.choice(LEADS if who == "leader" else PLACES)
        also = (chance.choice(("server-0", "server-1", "leader")),) if chance.random() < 0.3 else ()
        strikes.append(Strike(at, who, nth=chance.randint(0, 5), also=also))
    return strikes


class Mortal:
    """Kills workers before some of their slices; another one begins at once in the place of each."""

    def __init__(self, chance: random.Random, slices: int) -> None:
        self.left = sorted(chance.randint(1, slices) for _ in range(chance.randint(0, 2)))
        self.begun = 0
        self.again: object = None
        self.rig: Rig | None = None
        self._lock = threading.Lock()

    def __call__(self, ctx: Context, slices: int) -> None:
        with self._lock:
            self.begun += 1
            due = bool(self.left) and self.begun >= self.left[0]
            if due:
                self.left.pop(0)
        if due:
            assert self.rig is not None
            self.rig.work(self.again)  # type: ignore[arg-type]
            raise Died


def survived(rig: Rig, seed: int) -> None:
    """Strikes that were never due are none; the first one always is."""
    assert rig.strikes[0].fired, f"seed {seed}"
    rig.strikes[:] = [strike for strike in rig.strikes if strike.fired]


@pytest.mark.parametrize("seed", SEEDS)
def test_synchronous(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    strikes, mortal = planned(chance), Mortal(chance, 28)
    every, workers, transport = chance.choice((1, 2, 3)), chance.randint(1, 3), TRANSPORTS[seed % 2]
    with Rig(tmp_path, every, strikes, workers=workers, lease_s=3.0, cluster__transport=transport) as rig:
        mortal.rig, mortal.again = rig, program(mortal)
        rig.begin(program(mortal))
        rig.join_all()
        survived(rig, seed)
        summary = rig.finish()
        assert rig.orders.timelines, f"seed {seed}: the job never went back"
    same(summary, twin("faults", program(), slices_per_step=SLICES))


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous(seed: int, tmp_path: Path) -> None:
    chance, epochs = random.Random(1000 + seed), 3
    strikes, mortal = planned(chance), Mortal(chance, PER_EPOCH * epochs)
    strikes[0].nth = chance.randint(0, 60)
    with Rig(
        tmp_path,
        chance.randint(5, 20),
        strikes,
        mode="async",
        workers=chance.randint(1, 3),
        lease_s=3.0,
        training__chunk_bytes=64,
        cluster__transport=TRANSPORTS[seed % 2],
    ) as rig:
        script = LedgerProgram(CELLS, BATCH, epochs, mortal)
        mortal.rig, mortal.again = rig, script
        rig.begin(script)
        rig.join_all()
        survived(rig, seed)
        exact(rig, rig.finish(), epochs)
