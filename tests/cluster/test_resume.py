"""A job is stopped in the middle, and another one goes on from its files: other numbers of processes, the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.config import load_settings
from paramserver.coordinator.history.manifests import TRACKED_AS
from paramserver.coordinator.rpc import sessions
from paramserver.resume import checkpointing
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import LedgerProgram, Program, adamw, cosine, dataset, network, plain, sgd
from tests.support.cluster.small_job import BATCH, EPOCHS, SAMPLES, SLICES
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH as PAIR
from tests.support.failover.ledger import CELLS
from tests.support.failover.moments import PerEpoch
from tests.support.failover.rollback import Rig, Stop, same, twin
from tests.support.marks import long_but


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam with weight decay and AMSGrad."""
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=1e-3, amsgrad=True)


def make(**options: Any) -> Program:
    return Program(dataset(SAMPLES), BATCH, EPOCHS, **options)


PROGRAMS: dict[str, Callable[..., Program]] = {
    "momentum": lambda each=None: make(optimizer=sgd, schedule=cosine, each=each),
    "adam": lambda each=None: make(optimizer=adam, each=each),
    "adamw, buffers": lambda each=None: make(
        model=lambda: network(norm=True), optimizer=adamw, schedule=cosine, each=each
    ),
    "per epoch": lambda each=None: PerEpoch(dataset(SAMPLES), BATCH, EPOCHS, optimizer=sgd, each=each),
}


def found(rig: Rig) -> list[Manifest]:
    """The complete checkpoints, newest first."""
    return list(catalog.complete(Place(str(rig.checkpoints))))


def train_until(
    place: Path, version: int, saved: int, program: Callable[[Any], Any], every: int = 3, **options: Any
) -> None:
    """Train until version ``version``, wait for a checkpoint of ``saved`` or later, and end everything at once."""
    stop = Stop(version)
    with Rig(place, every, **options) as rig:
        rig.begin(program(stop))
        wait(stop.reached, f"version {version}")
        until("the checkpoint", lambda: any(manifest.version >= saved for manifest in found(rig)))
        for server in list(rig.keepers):
            rig.call(server.die)
        rig.ending = True
        stop.released.set()


def resumed(place: Path, program: Any, every: int = 3, **options: Any) -> tuple[Rig, dict[str, Any]]:
    """Go on from there, to the end."""
    with Rig(place, every, checkpoint__resume=str(place / "ckpt"), **options) as rig:
        rig.begin(program)
        summary = dict(rig.finish())
    return rig, summary


@pytest.mark.parametrize("servers", long_but({3}, [1, 3]))
@pytest.mark.parametrize("name", long_but({"adamw, buffers", "per epoch"}, PROGRAMS))
def test_e16_the_same_bits(name: str, servers: int, tmp_path: Path) -> None:
    train_until(tmp_path, 5, 3, PROGRAMS[name])
    rig, summary = resumed(tmp_path, PROGRAMS[name](), servers=servers, workers=3 if servers == 1 else 1)
    assert rig.orders.begun_with() in (3, 6)
    same(summary, twin(f"resume {name}", PROGRAMS[name](), slices_per_step=SLICES))
    assert summary["rollbacks"] == 0
    before = {3: 3 * SLICES * BATCH, 6: SAMPLES + 2 * SLICES * BATCH}[rig.orders.begun_with()]
    assert (summary["samples"], summary["samples_before"]) == (EPOCHS * SAMPLES, before)
    rate = (EPOCHS * SAMPLES - before) / summary["seconds"]
    assert summary["samples_per_s"] == pytest.approx(rate, rel=0.05), "of this run only"


def test_it_goes_on_twice(tmp_path: Path) -> None:
    """Each time on a new timeline."""
    program = PROGRAMS["adamw, buffers"]
    train_until(tmp_path, 2, 0, program)
    stop = Stop(5)
    with Rig(tmp_path, 3, checkpoint__resume=str(tmp_path / "ckpt"), workers=1) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 5")
        until("the checkpoint", lambda: any(manifest.version >= 3 for manifest in found(rig)))
        assert next((m.timeline, m.version) for m in found(rig)) == (1, 3)
        stop.released.set()
    rig, summary = resumed(tmp_path, program())
    assert {timeline for _, _, timeline, _ in rig.orders.timelines} == {2}
    same(summary, twin("resume adamw, buffers", program(), slices_per_step=SLICES))


def test_of_a_job_that_was_through(tmp_path: Path) -> None:
    """There is nothing left to do; the result is the same."""
    program = PROGRAMS["momentum"]
    with Rig(tmp_path, 3) as rig:
        rig.begin(program())
        first = rig.finish()
    _, summary = resumed(tmp_path, program(), servers=3)
    same(summary, first)
    assert (first["samples_before"], summary["samples_before"]) == (0, EPOCHS * SAMPLES)
    assert summary["samples_per_s"] == 0.0


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_g13_asynchronous_in_the_middle_of_an_epoch(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_TICK_S", 0.02)
    epochs = 3

    def program(each: Any = None) -> LedgerProgram:
        return LedgerProgram(CELLS, PAIR, epochs, each)

    train_until(tmp_path, 40, 5, program, every=5, mode="async", training__chunk_bytes=64)
    rig, summary = resumed(
        tmp_path, program(), every=5, mode="async", workers=workers, servers=3, training__chunk_bytes=64
    )
    assert rig.orders.begun_with() >= 5
    exact(rig, summary, epochs)


# ---- what does not fit


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of AdamW leaves, with checkpoints of versions 0, 3 and 6."""
    place = tmp_path_factory.mktemp("stopped")
    train_until(place, 7, 6, PROGRAMS["adamw, buffers"])
    return place


@pytest.fixture
def stopped(left: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    place = tmp_path / "stopped"
    shutil.copytree(left, place)
    return place


def checkpoint(place: Path, version: int) -> Path:
    """Its directory."""
    (path,) = (place / "ckpt").glob(f"step-{version:08d}-t*")
    return path


@pytest.mark.parametrize("part", ["model-00001", pytest.param("optimizer-00002", marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["a bit", "cut", "gone", "of another version (E25)"])
def test_e09_a_damaged_checkpoint_is_passed_over(part: str, how: str, stopped: Path) -> None:
    (victim,) = checkpoint(stopped, 6).glob(f"{part}-*")
    (other,) = checkpoint(stopped, 3).glob(f"{part}-*")
    if how == "a bit":
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
    elif how == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif how == "gone":
        victim.unlink()
    else:
        shutil.copyfile(other, victim)
    program = PROGRAMS["adamw, buffers"]
    rig, summary = resumed(stopped, program())
    restored = [version for _, _, _, version in rig.orders.timelines]
    assert set(restored[-2:]) == {3}, restored
    same(summary, twin("resume adamw, buffers", program(), slices_per_step=SLICES))


def test_all_are_damaged(stopped: Path) -> None:
    for path in (stopped / "ckpt").glob("step-*/model-00001-*"):
        path.write_bytes(path.read_bytes()[:-1])
    with Rig(stopped, 3, checkpoint__resume=str(stopped / "ckpt")) as rig:
        leader = rig.coordinate("leader")
        until("the leader gives up", leader.task.done)
        with pytest.raises(errors.ConfigError, match="there is no complete checkpoint in"):
            leader.task.result()


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another model": (
        lambda: make(model=lambda: network(norm=True, hidden=38), optimizer=adamw, schedule=cosine),
        errors.ModelError,
        "this worker's model differs",
    ),
    "another optimizer": (
        lambda: make(model=lambda: network(norm=True), optimizer=plain),
        errors.ModelError,
        "this worker's model differs",
    ),
    "another data set": (
        lambda: Program(dataset(SAMPLES + 1), BATCH, EPOCHS, model=lambda: network(norm=True), optimizer=adamw),
        errors.DataError,
        f"has {SAMPLES + 1} samples in slices of 8, the one registered first has {SAMPLES} samples|"
        f"has {SAMPLES + 1} samples in slices of 8, the one registered first has {SAMPLES} in slices of 8",
    ),
    "another batch size": (
        lambda: Program(dataset(SAMPLES), 9, EPOCHS, model=lambda: network(norm=True), optimizer=adamw),
        errors.DataError,
        "slices of 9",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_something_else_is_trained(what: str, stopped: Path) -> None:
    script, kind, text = MISTAKES[what]
    with Rig(stopped, 3, checkpoint__resume=str(stopped / "ckpt")) as rig:
        rig.begin(script())
        with pytest.raises(kind, match=text):
            rig.join()


def test_an_older_checkpoint_needs_a_directory_of_its_own(stopped: Path, tmp_path: Path) -> None:
    """A job goes back to the newest one in its directory, which would be that of another future."""
    older = checkpoint(stopped, 3)
    with pytest.raises(errors.ConfigError, match=r"has a newer checkpoint than step-00000003.*copy it to a directory"):
        checkpointing.resumed(load_settings(None, {"checkpoint.resume": str(older)}, environ={}))
    alone = tmp_path / "older" / older.name
    shutil.copytree(older, alone)
    taken = checkpointing.resumed(load_settings(None, {"checkpoint.resume": str(alone)}, environ={}))
    assert taken["checkpoint.dir"] == str(alone.parent)
    newest = load_settings(None, {"checkpoint.resume": str(checkpoint(stopped, 6))}, environ={})
    assert checkpointing.resumed(newest)["checkpoint.dir"] == str(older.parent)


REFUSED = {
    "consistency.mode": (
        "async",
        r"consistency.mode is async here .* was made with sync: resume, then use",
    ),
    "training.slices_per_step": (5, r"training.slices_per_step is 5 here .* was made with 4: leave it out"),
    "training.seed": (7, r"training.seed is 7 here .* was made with 0: leave it out"),
    "training.chunk_bytes": (4096, r"training.chunk_bytes is 4096 here .* was made with 512: leave it out"),
}


def test_what_the_settings_take_over_and_refuse(stopped: Path) -> None:
    """With `paramserver run --resume DIR`."""
    where = {"checkpoint.resume": str(stopped / "ckpt")}
    taken = checkpointing.resumed(load_settings(None, where, environ={}))
    wanted = {
        "consistency.mode": "sync",
        "training.slices_per_step": 4,
        "cluster.servers": 2,
        "cluster.workers": 2,
        "checkpoint.every": 3,
        "checkpoint.dir": str(stopped / "ckpt"),
    }
    assert {key: taken[key] for key in wanted} == wanted
    other = {**where, "cluster.servers": 5, "cluster.workers": 1}
    assert not {"cluster.servers", "cluster.workers"} & set(
        checkpointing.resumed(load_settings(None, other, environ={}))
    ), "numbers of processes are free"
    for key, (value, text) in REFUSED.items():
        with pytest.raises(errors.ConfigError, match=text):
            checkpointing.resumed(load_settings(None, {**where, key: value}, environ={}))
    assert checkpointing.find_checkpoint(str(checkpoint(stopped, 3))).version == 3
    assert checkpointing.find_checkpoint(str(stopped / "ckpt")).version == 6
    with pytest.raises(errors.ConfigError, match=r"there is (no complete checkpoint|nothing to go on from) in"):
        checkpointing.find_checkpoint(str(stopped / "elsewhere"))


def test_every_setting_of_the_first_run_counts_until_the_command_says_another_one(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, trackers, patience, faults: with `paramserver run --resume DIR` and nothing else."""
    given = {
        **{"run.records": "records.jsonl", "run.track": "mlflow", "run.report": "r.html", "run.summary": "s.json"},
        **{"run.save": "w.safetensors", "run.args": ["--epochs", "3"], "training.nonfinite": "fail"},
        **{"cluster.stall_s": 20.0, "cluster.replicas": 1, "cluster.servers": 3, "log.level": "warning"},
        **{"consistency.mode": "async"},
    }
    own = {"cluster.listen": "127.0.0.1", "web.dashboard": "off", "security.token_file": "token", "cluster.job": "one"}
    first = load_settings(None, {**given, **own}, environ={})
    options = checkpointing.checkpoint_options(first)
    saved = checkpointing.find_checkpoint(str(stopped / "ckpt"))
    monkeypatch.setattr(checkpointing, "find_checkpoint", lambda where: replace(saved, run=options.run or {}))
    where = {"checkpoint.resume": str(stopped / "ckpt")}
    taken = checkpointing.resumed(load_settings(None, where, environ={}))
    assert {key: taken.get(key) for key in given} == {**given, "consistency.mode": "sync"}
    assert not own.keys() & taken.keys(), "a process and a machine have these settings of their own"
    assert taken["training.slices_per_step"] == SLICES, "what the job had come to, and not what it was told at first"
    other = {**where, "run.records": "other.jsonl", "training.nonfinite": "skip"}
    again = checkpointing.resumed(load_settings(None, other, environ={"PARAMSERVER_RUN__TRACK": "wandb"}))
    assert not {"run.records", "training.nonfinite", "run.track"} & again.keys()
    assert load_settings(None, {**where, **taken}, environ={}).run == first.run


def test_trackers_go_on_with_the_run_of_the_first_job(stopped: Path) -> None:
    settings = load_settings(None, {"checkpoint.resume": str(stopped / "ckpt")}, environ={})
    tracked = checkpointing.tracked_as(settings)
    job, key = tracked.split(" ")
    assert job == checkpointing.find_checkpoint(str(stopped / "ckpt")).job
    assert int(key, 16)
    assert (checkpointing.checkpoint_options(settings, None, tracked).run or {})[TRACKED_AS] == tracked
    assert checkpointing.tracked_as(load_settings(None, {}, environ={})) == ""
