"""The digits model learns, in both modes, from flags, from a file, and alone."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import DIGITS, ROOT, Place, place_fixture, read_summary

CONFIG = "configs/digits.toml"
SLICES = 43  # 1,347 digits in batches of 32


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture(scope="module")
def by_file(place: Place) -> dict[str, Any]:
    """The run that the configuration file describes, one variable and one flag aside; from the repository's root."""
    path = place.work / "file.json"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(path), "PARAMSERVER_CLUSTER__WORKERS": "3"}
    place.paramserver("run", "--config", CONFIG, "--workers", "2", cwd=ROOT, environ=environ).check()
    return read_summary(path)


def test_synchronous_accuracy(by_file: dict[str, Any]) -> None:
    assert by_file["metrics"]["test_accuracy"] >= 0.97
    assert by_file["mode"] == "sync"
    assert by_file["contributions_applied"] == by_file["epochs"] * SLICES


def test_file_counts_below_variables_and_variables_below_flags(by_file: dict[str, Any]) -> None:
    file = tomllib.loads((ROOT / CONFIG).read_text())
    assert by_file["slices_per_step"] == file["training"]["slices_per_step"] == 4
    assert by_file["servers"] == file["cluster"]["servers"] == 2
    assert by_file["workers"] == 2  # the variable says 3, the flag 2


@pytest.mark.long
def test_asynchronous_accuracy(place: Place) -> None:
    path = place.work / "async.json"
    counts = ["--servers", "2", "--workers", "2"]
    done = place.paramserver("run", DIGITS, *counts, "--mode", "async", "--staleness", "4", "--summary", path).check()
    summary = read_summary(path)
    assert (summary["mode"], summary["staleness"]) == ("async", 4)
    assert summary["metrics"]["test_accuracy"] >= 0.97
    assert "async, staleness 4" in done.out
    # Every slice of every epoch once: each is a step of its own.
    assert summary["contributions_applied"] == summary["steps"] == summary["epochs"] * SLICES
    assert summary["samples"] == summary["epochs"] * 1347
    # A worker may be `staleness` ahead when it begins a slice, and counts it when it is done.
    assert 0 < summary["max_clock_spread"] <= 4 + 1


@pytest.mark.long
def test_loading_processes_and_script_arguments_and_the_script_alone(place: Place) -> None:
    alone, cluster = place.work / "alone.json", place.work / "loaders.json"
    arguments = ["--epochs", "2", "--batch-size", "64", "--optimizer", "adamw", "--dropout", "0.1"]
    environ = {"PARAMSERVER_CONFIG": str(ROOT / CONFIG), "PARAMSERVER_RUN__SUMMARY": str(alone)}
    text = place.python(DIGITS, *arguments, environ=environ).check().out
    assert "epoch 2: test accuracy " in text
    _run_with_loaders(place, cluster, arguments)
    one, other = read_summary(alone), read_summary(cluster)
    assert one["epochs"] == other["epochs"] == 2
    assert one["contributions_applied"] == other["contributions_applied"] == 2 * 22  # slices of 64
    for digest in ("weights_sha256", "buffers_sha256", "optimizer_sha256"):
        assert one[digest] == other[digest]
    assert other["metrics"]["test_accuracy"] == one["metrics"]["test_accuracy"]


def _run_with_loaders(place: Place, summary: Path, arguments: list[str]) -> None:
    flags: list[str | Path] = ["--config", ROOT / CONFIG, "--servers", "1", "--summary", summary]
    place.paramserver("run", DIGITS, *flags, "--", *arguments, "--num-workers", "2").check()
    assert place.processes() == {}
    assert place.leftovers() == []
