"""workers/gan.py trains both models, goes on from a checkpoint, and the number of workers does not show in one bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import ROOT, Place, place_fixture, read_summary

SCRIPT = str(ROOT / "workers/gan.py")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


def trained(place: Place, workers: int, epochs: int, *flags: str | Path) -> dict[str, Any]:
    """The summary of a run with steps of two slices, and two steps of the critic on each batch."""
    summary = place.work / f"gan-{workers}-{epochs}.json"
    some: list[str | Path] = ["--servers", "2", "--workers", str(workers), "--summary", summary]
    some += ["--set", "training.slices_per_step=2", *flags]
    small = ["--batch-size", "128", "--critic-steps", "2", "--epochs", str(epochs)]
    place.paramserver("run", SCRIPT, *some, "--", *small).check()
    return read_summary(summary)


@pytest.mark.long
def test_a_resumed_run_of_one_worker_makes_the_bits_of_two(place: Place) -> None:
    whole = trained(place, 2, 3)
    kept = place.work / "ckpt"
    first = trained(place, 1, 1, "--checkpoint-dir", kept, "--checkpoint-every", "5")
    rest = trained(place, 1, 3, "--resume", kept)
    assert first["weights_sha256"] != rest["weights_sha256"]
    for digest in ("weights_sha256", "optimizer_sha256", "buffers_sha256"):
        assert rest[digest] == whole[digest]
    assert rest["steps"] == whole["steps"] == 3 * 7 * 3
