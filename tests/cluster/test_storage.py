"""Storage that fails: no job begins without its first checkpoint; what is overdue, or missing at the end, is said."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.checkpoint import catalog, probe
from paramserver.checkpoint.place import Place
from paramserver.coordinator.history import overdue
from paramserver.core.procedures import checkpointing
from tests.support.cluster.harness import until, wait
from tests.support.cluster.processes import running_process
from tests.support.cluster.programs import Program, cosine, dataset, sgd
from tests.support.failover.rollback import Rig, Strike, same, twin

SLICES = 4
# Steps of the program.
LAST = 8


def program() -> Program:
    return Program(dataset(120), 8, 2, optimizer=sgd, schedule=cosine)


def wanted() -> Mapping[str, Any]:
    """What comes of it undisturbed."""
    return twin("owner", program(), slices_per_step=SLICES)


def versions(rig: Rig) -> list[int]:
    return [manifest.version for manifest in catalog.complete(Place(str(rig.checkpoints)))]


def folders(rig: Rig) -> list[str]:
    return sorted(path.name for path in rig.checkpoints.iterdir() if path.is_dir())


def troubles(rig: Rig) -> dict[str, str]:
    """What `status` shows as wrong now."""
    job = rig.leader.service
    assert job is not None
    return dict(job.job.promises.troubles)


def broken_off(rig: Rig) -> dict[str, Any]:
    """Wait for the end of a job that breaks a promise; its summary."""
    rig.join()
    leader = rig.chiefs[0].task
    until("the coordinator ends", leader.done)
    assert leader.result() == 1
    summary: dict[str, Any] = json.loads(rig.record().summary)
    return summary


@pytest.mark.parametrize("at", ["ckpt.tmp_open", "ckpt.before_rename", "ckpt.manifest"])
def test_no_step_without_the_first_checkpoint(at: str, tmp_path: Path) -> None:
    """E11: and no empty folder stays."""
    who = "leader" if at == "ckpt.manifest" else "server-0"
    failing = Strike(at, who, do="error", times=100)
    with Rig(tmp_path, 3, [failing]) as rig:
        rig.begin(program())
        with pytest.raises(errors.JobFailedError, match=r"the first checkpoint could not be written to .* as planned"):
            rig.join()
        assert failing.fired
        assert all(stats.applied == 0 for stats in rig.stats())
        assert folders(rig) == []


def test_a_place_of_the_launchers_own_was_not_asked_for(tmp_path: Path) -> None:
    """The job trains, and shows that no server may die."""
    failing = Strike("ckpt.tmp_open", "server-0", do="error", times=100)
    with Rig(tmp_path, 3, [failing]) as rig:
        rig.begin(program(), histories=("own",), private=True)
        until("it is said", lambda: "a server that dies now ends the job" in troubles(rig).get("checkpoint", ""))
        rig.join()
        assert "checkpoint" not in rig.record().broken_promises


def test_one_that_fails_is_shown_until_the_next_one_is_there(tmp_path: Path) -> None:
    failed, held, go = Strike("ckpt.tmp_open", "server-1", 3, do="error"), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(30.0)

    with Rig(tmp_path, 3, [failed, Strike("apply.mid", "server-0", 5, do=hold)]) as rig:
        rig.begin(program())
        wait(held, "step 5")
        told = until("it is said", lambda: troubles(rig).get("checkpoint", ""))
        assert "are overdue since version 3: server-1: cannot write" in told
        until("nothing is left of it", lambda: "step-00000003-t0" not in folders(rig))
        go.set()
        until("it is over", lambda: versions(rig)[0] >= 6 and not troubles(rig))
        summary = rig.finish()
        assert summary["broken_promises"] == []
        assert versions(rig)[0] == LAST
    same(summary, wanted())


def test_the_last_one_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is there, the promise is broken, and the summary names what exists."""
    monkeypatch.setattr(checkpointing, "STORAGE_S", 0.1)
    failed = Strike("ckpt.mid_write", "server-1", LAST, times=10**6, do="error")
    with Rig(tmp_path, 3, [failed]) as rig:
        rig.begin(program())
        summary = broken_off(rig)
        (sentence,) = summary["broken_promises"]
        assert f"version {LAST}, the last one, is not saved" in sentence
        assert "the newest checkpoint there is step-00000006-t0" in sentence
        assert summary["checkpoint"] == "step-00000006-t0"
        assert folders(rig) == ["step-00000000-t0", "step-00000003-t0", "step-00000006-t0"]
        assert failed.fired
    same(summary, wanted())


@pytest.mark.parametrize("at", ["ckpt.mid_write", "ckpt.manifest"])
def test_the_storage_fails_for_a_moment_just_when_the_job_ends(tmp_path: Path, at: str) -> None:
    """The last version is tried again. Before, the promise was broken for good."""
    failed = Strike(at, "leader" if at == "ckpt.manifest" else "server-1", LAST, times=3, do="error")
    with Rig(tmp_path, 3, [failed]) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert (summary["broken_promises"], failed.fired, versions(rig)[0]) == ([], 3, LAST)
    same(summary, wanted())


def test_the_directory_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not made again: the volume may have been taken away."""
    monkeypatch.setattr(checkpointing, "STORAGE_S", 0.1)

    def vanish() -> None:
        rig.checkpoints.rename(tmp_path / "away")

    with Rig(tmp_path, 3, [Strike("apply.mid", "server-0", 4, do=vanish)]) as rig:
        rig.begin(program())
        summary = broken_off(rig)
        assert not rig.checkpoints.exists()
        assert summary["checkpoint"] == ""
    same(summary, wanted())


def test_storage_that_hangs_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "LATE_S", 0.05)
    go = threading.Event()
    with Rig(tmp_path, 3, [Strike("ckpt.before_fsync", "server-1", 3, do=lambda: go.wait(30.0))]) as rig:
        rig.begin(program())
        until("it is said", lambda: "slow or does not answer" in troubles(rig).get("checkpoint", ""))
        go.set()
        summary = rig.finish()
        assert summary["broken_promises"] == []
    same(summary, wanted())


def test_a_server_that_does_not_see_the_same_directory_is_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody has computed anything; one that does takes its place."""
    (tmp_path / "other").mkdir()
    real, astray = probe.answer, ["server-1"]

    def answer(place: Place, question: str, name: str) -> None:
        process = running_process()
        assert process is not None
        real(Place(str(tmp_path / "other")) if process.name in astray else place, question, name)

    monkeypatch.setattr(probe, "answer", answer)
    with Rig(tmp_path, 3) as rig:
        rig.begin(program())
        until("it is refused", rig.keepers[1].task.done)
        with pytest.raises(errors.ConfigError, match="the server at server-1 does not share the place of the checkpoi"):
            rig.keepers[1].task.result()
        assert folders(rig) == []
        until("no question stays", lambda: not [*rig.checkpoints.glob(".tmp-*")])
        del rig.keepers[1]
        astray.clear()
        rig.serve(1)
        summary = rig.finish()
        assert versions(rig)[0] == LAST
    same(summary, wanted())
