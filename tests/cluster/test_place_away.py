"""The place of the checkpoints goes away while the job trains, and then a process dies: the job goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paramserver.resume import claiming
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import Program, cosine, dataset, sgd
from tests.support.failover.rollback import Rig, Stop, Strike, same, twin

SLICES = 4
# Steps of the program.
LAST = 8


def program(stop: Stop | None = None) -> Program:
    return Program(dataset(120), 8, 2, optimizer=sgd, schedule=cosine, each=stop)


def wanted() -> Any:
    """What comes of it undisturbed."""
    return twin("place away", program(), slices_per_step=SLICES)


def reason(rig: Rig) -> str:
    """What `status` shows as wrong now."""
    job = next((chief.service for chief in reversed(rig.chiefs) if chief.service is not None), None)
    return "; ".join(job.job.promises.troubles.values()) if job is not None else ""


def ended(rig: Rig, code: int) -> Any:
    """Wait for the end of the job with this exit code; its summary."""
    rig.join_all()
    leader = rig.chiefs[-1].task
    until("the coordinator ends", leader.done, 60.0)
    assert leader.result() == code
    return json.loads(rig.record().summary)


@pytest.mark.parametrize("back", [True, False])
def test_a_server_joins_without_the_place(tmp_path: Path, back: bool) -> None:
    """Others have its shards. Before, it was refused, and `run` ended the job with code 2."""
    stop, away = Stop(5), tmp_path / "away"
    with Rig(tmp_path, 3, cluster__replicas=1) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 5")
        rig.until_saved(3)
        rig.checkpoints.rename(away)
        rig.kill_now("server-1")
        until("it is shown", lambda: "has joined without the place of the checkpoints" in reason(rig), 30.0)
        if back:
            away.rename(rig.checkpoints)
        stop.released.set()
        summary = ended(rig, 0 if back else 1)
    same(summary, wanted())
    assert summary["rollbacks"] == 0
    assert [f"version {LAST}, the last one, is not saved" in one for one in summary["broken_promises"]] == [True] * (
        not back
    )


def test_a_coordinator_takes_over_without_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not make the directory again, since that may be a volume. It claims the place when the place is back."""
    monkeypatch.setattr(claiming, "BEAT_S", 0.05)
    stop, away = Stop(5), tmp_path / "away"
    with Rig(tmp_path, 3) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 5")
        rig.until_saved(3)
        rig.checkpoints.rename(away)
        rig.kill_now("leader")
        until("another coordinator leads", lambda: len(rig.chiefs) == 2 and rig.chiefs[1].service is not None, 30.0)
        assert not rig.checkpoints.exists()
        before = json.loads((away / "OWNER.json").read_text())["claim"]
        away.rename(rig.checkpoints)
        owner = rig.checkpoints / "OWNER.json"
        until("it has the place", lambda: json.loads(owner.read_text())["claim"] != before)
        stop.released.set()
        summary = ended(rig, 0)
    same(summary, wanted())


def test_going_back_waits_for_the_place(tmp_path: Path) -> None:
    """Without replicas a lost shard is in the checkpoint alone. Before, the job failed at once."""
    stop, away = Stop(5), tmp_path / "away"
    with Rig(tmp_path, 3) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 5")
        rig.until_saved(3)
        rig.checkpoints.rename(away)
        rig.kill_now("server-1")
        until("it waits", lambda: "has no checkpoint any more: put the checkpoints back" in reason(rig), 30.0)
        away.rename(rig.checkpoints)
        stop.released.set()
        summary = ended(rig, 0)
        assert "put the checkpoints back" not in reason(rig)
    same(summary, wanted())
    assert summary["rollbacks"] == 1


def test_a_checkpoint_that_goes_while_servers_read_it_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """It comes back, and the job goes on from it."""
    stop, away = Stop(5), tmp_path / "away"

    def vanish() -> None:
        rig.checkpoints.rename(away)

    going = Strike("restore.before_load", do=vanish)
    with Rig(tmp_path, 3, [going]) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 5")
        rig.until_saved(3)
        rig.kill_now("server-1")
        wait(going.done, "the checkpoint is about to be read")
        until("it waits", lambda: "put" in reason(rig), 30.0)
        away.rename(rig.checkpoints)
        stop.released.set()
        summary = ended(rig, 0)
    same(summary, wanted())


@pytest.mark.parametrize("gone", ["deleted", "a file in its place"])
def test_a_coordinator_takes_over_without_the_file_of_records(tmp_path: Path, gone: str) -> None:
    """The job goes on; the promise is broken. Before, the next coordinator ended, or began a file without a word."""
    stop, folder = Stop(5), tmp_path / "records"
    with Rig(tmp_path, 3, run__records=str(folder / "r.jsonl")) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 5")
        until("it is written", lambda: (folder / "r.jsonl").exists())
        shutil.rmtree(folder)
        if gone != "deleted":
            folder.touch()
        rig.kill_now("leader")
        until("another coordinator leads", lambda: len(rig.chiefs) == 2 and rig.chiefs[1].service is not None, 30.0)
        stop.released.set()
        summary = ended(rig, 1)
    (sentence,) = summary["broken_promises"]
    assert str(folder / "r.jsonl") in sentence
    same(summary, wanted())
