"""Two roles that share a machine die at the same moment, and the store keeps what it had, or loses it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import Place, Running, complaint, read_summary, until
from tests.support.integration.roles import TRAIN, Cluster, cluster_fixture, kill, reference, same_result

EPOCHS = 12
SCRIPT = ("--epochs", str(EPOCHS))
SLICES = 15 * EPOCHS
LEADS = r"(?m)^coordinator of job"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


@cache
def wanted() -> dict[str, Any]:
    """The result without faults."""
    with Place() as place:
        return reference(place, *SCRIPT)


def version_of(status: dict[str, Any]) -> int:
    return max((p["version"] for p in status["processes"] if p["role"] == "server"), default=0)


class Job:
    """Two servers and two workers in the middle of their training. ``own``: its coordinator has a private store."""

    def __init__(self, cluster: Cluster, mode: str, own: bool = False) -> None:
        self.cluster, self.mode = cluster, mode
        self.summary = cluster.place.work / "summary.json"
        self.hurry = cluster.place.work / "hurry"
        self.store = "auto" if own else cluster.url
        self.flags: list[str | Path] = ["--servers", "2", "--workers", "2", "--mode", mode, "--summary", self.summary]
        self.flags += ["--set", "training.slices_per_step=4"]
        self.flags += ["--checkpoint-dir", cluster.place.work / "checkpoints", "--checkpoint-every", "5"]
        self.script = (*SCRIPT, "--pace", "0.1", "--hurry", self.hurry)
        self.coordinator = self.lead("127.0.0.1:0")
        self.coordinator.wait_for(LEADS)
        address = self.coordinator.out.partition(" at ")[2].split()[0]
        cluster.addresses.append(address)
        for _ in range(2):
            cluster.server()
            cluster.worker(*self.script)
        cluster.until_status("training", lambda s: version_of(s) >= 3)

    def lead(self, address: str, *flags: str) -> Running:
        running = self.cluster.place.launch(
            *("start", "coordinator", "--listen", address, "--job", self.cluster.job, "--store", self.store),
            *self.flags,
            *flags,
            environ=self.cluster.environ,
        )
        self.cluster.coordinators[:] = [running]
        return running

    def lead_again(self, *flags: str) -> Running:
        return self.lead(self.cluster.addresses[0], *flags)

    def ends_well(self) -> None:
        """The same bits, or, asynchronously, exact counts."""
        self.hurry.touch()
        self.cluster.ended()
        found = read_summary(self.summary)
        if self.mode == "sync":
            same_result(found, wanted())
        assert (found["samples"], found["contributions_applied"]) == (230 * EPOCHS, SLICES)


def forget(directory: Path) -> None:
    """What a store has on its disk is lost; its lock stays."""
    for entry in directory.iterdir():
        if entry.name != "store.lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def both_die(job: Job, pair: str, lost: bool) -> None:
    cluster = job.cluster
    names = pair.split("+")
    running = {"coordinator": job.coordinator, "server": cluster.servers[0], "worker": cluster.workers[0]}
    dying = [running[name] for name in names if name != "store"]
    for one in dying:
        one.send(signal.SIGKILL)
    if "store" in names:
        assert cluster.store.pid is not None
        os.kill(cluster.store.pid, signal.SIGKILL)
        until("the store is gone", lambda: not cluster.store.running, 5.0)
        cluster.store.stop()
        if lost:
            forget(cluster.store_directory)
        assert cluster.store.start(cluster.store_directory) == cluster.url
    elif lost:
        import redis

        redis.Redis.from_url(cluster.url).flushall()
    for one in dying:
        assert one.wait().code == -signal.SIGKILL
    cluster.servers[:] = [one for one in cluster.servers if one not in dying]
    cluster.workers[:] = [one for one in cluster.workers if one not in dying]
    if "coordinator" in names:
        job.lead_again("--resume").wait_for(LEADS)
    new = [cluster.server()] if "server" in names else []
    if "worker" in names:
        new.append(cluster.worker(*job.script))
    # On a fast machine the others would be done before the new ones are there.
    pids = {one.pid for one in new}
    if new:
        cluster.until_status("the new ones take part", lambda s: pids <= {p["pid"] for p in s["processes"]})


CASES = [
    (pair, mode, lost)
    for pair in ("coordinator+store", "coordinator+server", "server+worker", "store+server")
    for mode in ("sync", "async")
    for lost in (False, True)
]


@pytest.mark.long
@pytest.mark.parametrize(("pair", "mode", "lost"), CASES)
def test_two_roles_die_at_once(cluster: Cluster, pair: str, mode: str, lost: bool) -> None:
    job = Job(cluster, mode)
    both_die(job, pair, lost)
    job.ends_well()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "lost"),
    [("sync", True), *(pytest.param(*c, marks=pytest.mark.long) for c in [("sync", False), ("async", True)])],
)
def test_a_coordinator_and_its_private_store(cluster: Cluster, mode: str, lost: bool) -> None:
    """The machine of the coordinator begins anew, with its disk or without: the same command with --resume goes on."""
    job = Job(cluster, mode, own=True)
    kill(job.coordinator)
    state = cluster.place.work / "state/paramserver" / cluster.job
    assert state.stat().st_mode & 0o777 == 0o700
    if lost:
        shutil.rmtree(state)
    else:
        text = complaint(job.lead_again().wait(), 2)
        assert "has not ended" in text
        assert "--resume" in text
    again = job.lead_again("--resume")
    job.ends_well()
    assert ("it goes on from what the servers know" in again.err) == lost


def test_resume_with_nothing_to_resume(cluster: Cluster) -> None:
    done = cluster.place.paramserver(
        *("start", "coordinator", "--listen", "127.0.0.1:0", "--job", "nobody", "--resume"),
        *("--set", "cluster.join_timeout_s=1"),
        environ=cluster.environ,
    )
    text = complaint(done, 2)
    assert "there is nothing to resume" in text
    assert "knows no job 'nobody'" in text


@pytest.mark.long
@pytest.mark.parametrize("pair", ["coordinator+store", "coordinator+server", "server+worker", "store+server"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_run_goes_on_when_two_of_its_processes_die(pair: str, mode: str) -> None:
    with Place() as place:
        hurry, summary = place.work / "hurry", place.work / "summary.json"
        running = place.launch(
            *("run", TRAIN, "--servers", "2", "--workers", "2", "--mode", mode, "--slices-per-step", "4"),
            *("--job", "pair", "--summary", summary, "--", *SCRIPT, "--pace", "0.1", "--hurry", hurry),
        )
        found: dict[str, Any] = {}

        def trains() -> bool:
            if "coordinator at" in running.out:
                found.update(place.status("--job", "pair"))
            return bool(found) and version_of(found) >= 3

        until("it trains", trains, 60.0)
        pids = {p["role"]: p["pid"] for p in found["processes"]}
        stores = [pid for pid in place.processes() if b"valkey" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        pids["store"] = stores[0]
        for role in pair.split("+"):
            os.kill(pids[role], signal.SIGKILL)
        running.wait_for(r"is started again|was started again", count=len(pair.split("+")))
        hurry.touch()
        running.wait().check()
        result = read_summary(summary)
        if mode == "sync":
            same_result(result, wanted())
        assert (result["samples"], result["contributions_applied"]) == (230 * EPOCHS, SLICES)
