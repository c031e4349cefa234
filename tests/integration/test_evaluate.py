"""An evaluation in real processes, one of which is killed in it: results and weights are those of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import ROOT, Place, place_fixture, read_summary
from tests.support.integration.paced import counts

SCRIPT = ROOT / "tests" / "support" / "integration" / "evaluates.py"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
def test_a_worker_is_killed_while_it_evaluates(place: Place) -> None:
    one, two = place.work / "one", place.work / "two"
    one.mkdir()
    two.mkdir()
    flags = ("--slices-per-step", "4", "--summary")
    place.paramserver("run", SCRIPT, *counts(1, 1), *flags, one / "summary.json", "--", one, "-1").check()
    done = place.paramserver("run", SCRIPT, *counts(2, 2), *flags, two / "summary.json", "--", two, "1").check()
    assert "worker-1 was killed by signal 9" in done.out
    assert (two / "killed").exists()
    expected = json.loads((one / "found.json").read_text())
    assert [sum(batch["of"] for batch in epoch) for epoch in expected] == [60] * 3
    assert json.loads((two / "found.json").read_text()) == expected
    for key in ("weights_sha256", "optimizer_sha256", "steps"):
        assert read_summary(two / "summary.json")[key] == read_summary(one / "summary.json")[key], key
