"""workers/charlm.py learns, and the number of workers does not show in one bit of the result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import ROOT, Place, place_fixture, read_summary

SCRIPT = str(ROOT / "workers/charlm.py")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


def trained(place: Place, text: Path, workers: int, *more: str) -> tuple[dict[str, Any], str]:
    """The summary and the output of a run with steps of two slices."""
    summary = place.work / f"charlm-{workers}.json"
    flags: list[str | Path] = ["--servers", "2", "--workers", str(workers), "--summary", summary]
    flags += ["--set", "training.slices_per_step=2"]
    small = ["--text", str(text), "--context", "32", "--batch-size", "8", "--epochs", "2", "--sample", "40"]
    done = place.paramserver("run", SCRIPT, *flags, "--", *small, *more).check()
    return read_summary(summary), done.out


@pytest.mark.long
def test_the_loss_falls_and_one_worker_makes_the_bits_of_two(place: Place) -> None:
    text = place.work / "text.txt"
    text.write_bytes((ROOT / "paramserver/errors.py").read_bytes())
    found = {workers: trained(place, text, workers) for workers in (1, 2)}
    (one, words), (two, _) = found[1], found[2]
    for digest in ("weights_sha256", "optimizer_sha256"):
        assert one[digest] == two[digest]
    assert one["metrics"]["validation_loss"] == two["metrics"]["validation_loss"] < 3.5
    assert "epoch 2: validation loss" in words
    assert "def " in words
