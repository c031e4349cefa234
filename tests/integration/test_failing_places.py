"""Processes die while the place of the checkpoints is full, read-only, gone or slow: no such fault ends a job early."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from paramserver import errors
from paramserver.testing.arming import environment
from tests.support.integration.disks import Disk
from tests.support.integration.harness import Place, Running, place_fixture, read_summary, status_of, until
from tests.support.integration.roles import TRAIN, Cluster

EPOCHS = "40"
TRAINING = ("--servers", "2", "--workers", "2", "--checkpoint-every", "5")
TWINS: dict[str, str] = {}


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@dataclass(frozen=True)
class Case:
    """``victim``: the process that is killed during the ``fault``. ``back``: the fault ends before the run does."""

    victim: str
    fault: str
    back: bool
    replicas: int = 1
    mode: str = "sync"

    def __str__(self) -> str:
        end = "back" if self.back else "for-good"
        return f"{self.victim}-{self.fault}-{end}-{self.replicas}-{self.mode}"

    @property
    def lost(self) -> bool:
        """Without replicas only a checkpoint brings the shards of a dead server back."""
        gone = self.fault == "deleted" or (self.fault == "renamed" and not self.back)
        return gone and self.victim == "server-1" and not self.replicas


def table() -> list[Case]:
    return [
        Case(victim, fault, back, replicas, mode)
        for victim in ("server-1", "worker-1", "coordinator")
        for fault in ("full", "read-only", "renamed", "deleted", "slow")
        for back in (True, False)
        for replicas in (1, 0)
        for mode in ("sync", "async")
        if back or fault != "slow"
    ]


def twin(place: Place) -> str:
    """The digest of the weights without faults."""
    if not TWINS:
        summary = place.work / "twin.json"
        command = ("run", TRAIN, *TRAINING, "--checkpoint-dir", place.work / "twin", "--summary", summary)
        place.paramserver(*command, "--", "--epochs", EPOCHS).check()
        TWINS["sync"] = read_summary(summary)["weights_sha256"]
    return TWINS["sync"]


def plan(place: Place, do: str, seconds: float) -> dict[str, str]:
    """Variables that arm the processes with a fault of the storage."""
    path = place.work / "chaos.toml"
    path.write_text(f'[[fault]]\nstorage = "checkpoints"\ndo = "{do}"\nstep = 8\nseconds = {seconds}\n')
    return environment(path)


def shown(running: Running) -> str:
    """What `status` says about the place of the checkpoints; "" while no coordinator answers."""
    with contextlib.suppress(errors.ParamServerError):
        reason = str(status_of(running)["reason"])
        return reason if "checkpoint" in reason else ""
    return ""


def saved(found: dict[str, object]) -> bool:
    """There is a checkpoint of another version than 0."""
    return not str(found["checkpoint"]).startswith("step-00000000-") and bool(found["checkpoint"])


@pytest.mark.long
@pytest.mark.timeout(360)
@pytest.mark.parametrize("case", table(), ids=str)
def test_a_process_dies_while_the_place_of_the_checkpoints_fails(place: Place, case: Case) -> None:
    """Same weights as in a quiet run. Code 0 if the last version is saved in the end, else 1 and a sentence."""
    disk, summary, hurry = Disk(place), place.work / "summary.json", place.work / "hurry"
    slow = case.fault == "slow"
    running = disk.launch(
        *("run", TRAIN, *TRAINING, "--checkpoint-dir", disk.ckpt, "--replicas", str(case.replicas)),
        *("--mode", case.mode, "--summary", summary, "--set", "cluster.max_idle_s=20"),
        *("--", "--pace", "0.05", "--epochs", EPOCHS, "--hurry", hurry),
        environ=plan(place, "slow", 6.0) if slow else None,
    )
    until("a checkpoint is there", lambda: " trains with " in running.out and saved(status_of(running)), 60.0)
    if not slow:
        disk.fail(case.fault)
    reached = status_of(running)["version"]
    os.kill(next(one["pid"] for one in status_of(running)["processes"] if one["name"] == case.victim), signal.SIGKILL)
    running.wait_for(rf"{case.victim} is started again")
    if case.back and not slow:
        until("it is shown", lambda: shown(running), 60.0)
        disk.mend(case.fault)
    hurry.touch()
    done = running.wait(120.0)
    if case.lost:
        assert "has no checkpoint any more" in done.check(1).said, done.text
        return
    done.check(0 if case.back else 1)
    found = read_summary(summary)
    assert found["steps"] > reached
    assert [one for one in found["broken_promises"] if "is not saved in" in one] == found["broken_promises"]
    assert bool(found["broken_promises"]) is not case.back, done.text
    if case.mode == "sync":
        assert found["weights_sha256"] == twin(place)


def put_back(ckpt: Path, away: Path) -> bool:
    """The directory is there again, with what it had before if that was renamed."""
    shutil.rmtree(ckpt, ignore_errors=True)
    with contextlib.suppress(OSError):
        away.rename(ckpt) if away.exists() else ckpt.mkdir(exist_ok=True)
    return ckpt.exists()


@pytest.mark.long
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("fault", "replicas"),
    # Without replicas a checkpoint alone brings a shard back, so one that is deleted ends the job: the table above.
    [*product(("full", "read_only", "slow", "renamed"), (0, 1)), ("deleted", 1)],
)
def test_by_hand(place: Place, fault: str, replicas: int) -> None:
    """A server and the coordinator die and are started again by hand, while the storage has a fault."""
    ckpt, away, hurry = place.work / "ckpt", place.work / "away", place.work / "hurry"
    gone = fault in ("renamed", "deleted")
    cluster = Cluster(place, environ=None if gone else plan(place, fault, 8.0))
    flags: tuple[str | Path, ...] = (*TRAINING, "--checkpoint-dir", ckpt, "--replicas", str(replicas))
    try:
        leader = cluster.coordinator(*flags)
        port = ("--listen", cluster.addresses[0])
        first, _ = cluster.server(), cluster.server()
        for _ in range(2):
            cluster.worker("--pace", "0.05", "--epochs", EPOCHS, "--hurry", hurry)
        if gone:
            cluster.until_status("a checkpoint is there", saved)
            ckpt.rename(away)
            if fault == "deleted":
                shutil.rmtree(away)
        else:
            until("the fault has begun", (place.work / "chaos.toml.fired").exists, 60.0)
        first.send(signal.SIGKILL)
        cluster.server()
        cluster.until_status("a server came", lambda found: len(found["processes"]) == 5 and first.ended)
        leader.send(signal.SIGKILL)
        again = place.launch(
            *("start", "coordinator", *port, "--job", cluster.job, "--store", cluster.url, "--resume", *flags),
            environ=cluster.environ,
        )
        again.wait_for("coordinator of job")
        if gone:
            until("it is back", partial(put_back, ckpt, away), 60.0)
        hurry.touch()
        for running in (*cluster.workers, again):
            running.wait().check()
        assert f"weights sha256 {twin(place)}" in again.out
    finally:
        cluster.close()
