"""The main worker is killed after training, before it has saved, and nobody else is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import Place, place_fixture
from tests.support.integration.paced import counts

SCRIPT = Path(__file__).parents[1] / "support" / "integration" / "saves.py"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_its_successor_saves(place: Place) -> None:
    saved = place.work / "saved"
    done = place.paramserver("run", SCRIPT, *counts(1, 2), "--store", "memory", "--", str(saved)).check()
    assert "the main worker was killed before its script had come to its end (worker-0)" in done.out
    assert saved.read_text() == "rank 0 saves\n"


def test_without_a_successor_the_run_fails(place: Place) -> None:
    saved = place.work / "saved"
    alone = ["--set", "cluster.max_restarts=0"]
    done = place.paramserver("run", SCRIPT, *counts(1, 2), "--store", "memory", *alone, "--", str(saved)).check(137)
    assert "the main worker was killed before its script had come to its end (worker-0)" in done.out
    assert saved.read_text() == ""
