"""Synchronous training gives the same bits however many workers and servers take part, and alone."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import SCRIPTS, Place, place_fixture, read_summary

TRAIN = SCRIPTS / "train.py"
SLICES_PER_STEP = 4
EPOCHS, SAMPLES, SLICES = 5, 230, 15
STEPS = EPOCHS * 4  # 15 slices are three steps of four slices, and one of three
SMALL_CHUNKS = "training.chunk_bytes=1024"  # so that every server has several


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


class Runs:
    """Each run is made once, when it is first asked for."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._summaries: dict[tuple[str, int, int, int], dict[str, Any]] = {}

    def alone(self, optimizer: str) -> dict[str, Any]:
        """The summary of the script by itself."""
        key = (optimizer, 0, 0, 0)
        if key not in self._summaries:
            path = self.place.work / f"{optimizer}.json"
            environ = {
                "PARAMSERVER_RUN__SUMMARY": str(path),
                "PARAMSERVER_TRAINING__SLICES_PER_STEP": str(SLICES_PER_STEP),
                "PARAMSERVER_TRAINING__CHUNK_BYTES": "1024",
            }
            self.place.python(TRAIN, "--optimizer", optimizer, environ=environ).check()
            self._summaries[key] = read_summary(path)
        return self._summaries[key]

    def cluster(self, optimizer: str, workers: int, servers: int, again: int = 0) -> dict[str, Any]:
        """The summary of a run on a cluster."""
        key = (optimizer, workers, servers, again)
        if key not in self._summaries:
            path = self.place.work / f"{optimizer}-{workers}-{servers}-{again}.json"
            counts = ["--workers", str(workers), "--servers", str(servers), "--slices-per-step", str(SLICES_PER_STEP)]
            outputs: list[str | Path] = ["--summary", path, "--save", path.with_suffix(".safetensors")]
            done = self.place.paramserver(
                "run", TRAIN, *counts, *outputs, "--set", SMALL_CHUNKS, "--", "--optimizer", optimizer
            ).check()
            summary = self._summaries[key] = read_summary(path)
            assert summary["weights_sha256"] in done.out
        return self._summaries[key]


@pytest.fixture(scope="module")
def runs(place: Place) -> Runs:
    return Runs(place)


def digests(summary: dict[str, Any]) -> tuple[str, str, str]:
    return summary["weights_sha256"], summary["buffers_sha256"], summary["optimizer_sha256"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "servers"),
    [(3, 2), *(pytest.param(*shape, marks=pytest.mark.long) for shape in [(1, 1), (2, 1), (2, 2), (4, 3)])],
)
def test_adamw_with_a_cosine_schedule_and_dropout(runs: Runs, workers: int, servers: int) -> None:
    summary = runs.cluster("adamw", workers, servers)
    assert digests(summary) == digests(runs.alone("adamw"))
    assert (summary["workers"], summary["servers"], summary["steps"]) == (workers, servers, STEPS)
    assert summary["contributions_applied"] == EPOCHS * SLICES


@pytest.mark.long
def test_from_run_to_run(runs: Runs) -> None:
    again = runs.cluster("adamw", 2, 2, again=1)
    assert digests(again) == digests(runs.cluster("adamw", 2, 2))
    assert again["metrics"]["test_accuracy"] == runs.cluster("adamw", 2, 2)["metrics"]["test_accuracy"]


@pytest.mark.long
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_sgd_with_momentum(runs: Runs, workers: int, servers: int) -> None:
    summary = runs.cluster("sgd", workers, servers)
    assert digests(summary) == digests(runs.alone("sgd"))
    assert summary["weights_sha256"] != runs.alone("adamw")["weights_sha256"]


def test_summary_has_all_fields(runs: Runs) -> None:
    summary = runs.cluster("adamw", 3, 2)
    known = {
        "mode": "sync",
        "staleness": None,
        "servers": 2,
        "workers": 3,
        "slices_per_step": SLICES_PER_STEP,
        "steps": STEPS,
        "epochs": EPOCHS,
        "samples": EPOCHS * SAMPLES,
        "contributions_applied": EPOCHS * SLICES,
        "steps_skipped": 0,
        "max_clock_spread": 0,
    }
    assert {key: summary[key] for key in known} == known
    # On a busy machine one worker may have computed slices of another one, which then counted once.
    assert 0 <= summary["contributions_duplicate"] <= EPOCHS * SLICES
    assert isinstance(summary["job"], str)
    assert summary["job"].startswith("train-")
    assert isinstance(summary["seconds"], float)
    assert 0 < summary["seconds"] < 100
    assert summary["samples_per_s"] == pytest.approx(summary["samples"] / summary["seconds"], rel=0.05)
    assert set(summary["metrics"]) == {"loss", "test_accuracy"}
    assert all(isinstance(value, float) for value in summary["metrics"].values())
    for key in ("weights_sha256", "buffers_sha256", "optimizer_sha256"):
        assert re.fullmatch("[0-9a-f]{64}", summary[key]), key
    # Every worker pulls every version, and pushes at most one contribution per step and node.
    weights = 4 * (16 * 64 + 64 + 64 * 4 + 4 + 2 * 64)
    for key in ("bytes_pushed", "bytes_pulled"):
        assert isinstance(summary[key], int)
        assert summary[key] > STEPS * weights, key


def test_summary_of_the_script_alone(runs: Runs) -> None:
    alone, cluster = runs.alone("adamw"), runs.cluster("adamw", 3, 2)
    assert alone.keys() == cluster.keys()
    same = ("mode", "slices_per_step", "steps", "epochs", "samples", "contributions_applied")
    assert [alone[key] for key in same] == [cluster[key] for key in same]
    assert alone["metrics"]["test_accuracy"] == cluster["metrics"]["test_accuracy"]


def test_saved_weights_load_into_the_plain_model(runs: Runs) -> None:
    from safetensors.torch import load_file

    summary = runs.cluster("adamw", 3, 2)
    (path,) = runs.place.work.glob("adamw-3-2-0.safetensors")
    train = _import(TRAIN)
    model = train.build_model()
    model.load_state_dict(load_file(path), strict=True)
    assert train.accuracy(model) == pytest.approx(summary["metrics"]["test_accuracy"], abs=1e-6)
    assert summary["metrics"]["test_accuracy"] > 0.8
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    assert digest.hexdigest() == summary["weights_sha256"]
    assert model[1].num_batches_tracked.item() > 0


def test_no_files_are_left(runs: Runs, place: Place) -> None:
    runs.cluster("adamw", 3, 2)
    assert place.processes() == {}
    assert place.leftovers() == []


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_batches_that_the_script_draws_itself(place: Place) -> None:
    """Alone, one worker computes both slices of each step; on a cluster two have one each: the same bits."""
    path, script = place.work / "own-batches.json", SCRIPTS / "own_batches.py"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(path), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "2"}
    place.python(script, "20", environ=environ).check()
    alone = read_summary(path)
    shape = ["--workers", "2", "--servers", "1", "--slices-per-step", "2"]
    place.paramserver("run", script, *shape, "--summary", path, "--", "10").check()
    found = read_summary(path)
    assert (alone["steps"], found["steps"]) == (10, 10)
    assert digests(found) == digests(alone)


@pytest.mark.long
def test_a_plain_loop_that_closes_nothing(place: Place) -> None:
    """What it ends with is there, alone and on a cluster."""
    path, script = place.work / "plain-loop.json", SCRIPTS / "plain_loop.py"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(path), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "2"}
    place.python(script, environ=environ).check()
    alone = read_summary(path)
    shape = ["--workers", "2", "--servers", "1", "--slices-per-step", "2"]
    place.paramserver("run", script, *shape, "--summary", path).check()
    found = read_summary(path)
    for summary in (alone, found):
        assert (summary["epochs"], summary["steps"], summary["samples"]) == (3, 39, 600)
    assert digests(found) == digests(alone)
