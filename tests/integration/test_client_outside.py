"""`ps.Client` in a script of a job, and in a process that only knows where the coordinator is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import SCRIPTS, Place, place_fixture, read_summary

PUSHES = 5


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_client_from_outside(place: Place, mode: str) -> None:
    stop, path = place.work / "stop", place.work / "summary.json"
    flags = ["--servers", "1", "--workers", "1", "--mode", mode, "--store", "memory"]
    running = place.launch("run", SCRIPTS / "count.py", *flags, "--summary", path, "--", "--stop", stop)
    running.wait_for("rank 0 counts")
    (address,) = [p["address"] for p in place.status()["processes"] if p["role"] == "coordinator"]
    text = place.start(sys.executable, SCRIPTS / "visit.py", address, str(PUSHES)).wait().check().out
    match = re.fullmatch(r"rank 1 version (\d+) before \[(.*)\] after \[(.*)\]\n", text)
    assert match is not None, text
    before, after = ([float(number) for number in match.group(part).split(",")] for part in (2, 3))
    # Three cells see the same pushes of ours with three weights, so their differences count ours alone.
    assert (after[1] - before[1]) - (after[0] - before[0]) == 9 * PUSHES
    assert (after[2] - before[2]) - (after[0] - before[0]) == 99 * PUSHES
    assert after[0] - before[0] >= PUSHES
    stop.touch()
    done = running.wait().check()
    seen = re.search(r"rank 0 has seen \[([\d.]+), ([\d.]+), ([\d.]+)\]", done.out)
    assert seen is not None, done.text
    ones, tens, hundreds = (float(seen.group(part)) for part in (1, 2, 3))
    assert (tens - ones, hundreds - ones) == (9 * PUSHES, 99 * PUSHES)
    summary = read_summary(path)
    assert summary["mode"] == mode
    # Each contribution added one or was one of the visitor's: all were counted once.
    assert summary["contributions_applied"] == ones
    if mode == "async":  # synchronous: two may want the part of the step in which the visitor comes
        assert summary["contributions_duplicate"] == 0
