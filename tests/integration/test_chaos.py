"""`paramserver chaos`: real processes, real faults, and the bits of a run without them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import SCRIPTS, Place, place_fixture

PLAN = """
[[fault]]
process = "worker-1"
step = 20
do = "kill"

[[fault]]
call = "Shard.Push"
who = "worker-0"
step = 2
do = "lose_reply"

[[fault]]
at = "reply.drop"
who = "server-1"
step = 3
do = "error"

[[fault]]
at = "push.recv"
who = "server-0"
step = 4
do = "stop"
seconds = 0.2

[[fault]]
process = "coordinator"
after_s = 0.01
do = "stop"
seconds = 0.2
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
def test_a_run_under_faults_has_the_bits_of_one_without(place: Place) -> None:
    (place.work / "chaos.toml").write_text(PLAN)
    done = place.paramserver(
        *("chaos", "--plan", "chaos.toml", "--report", "report.json", "--"),
        *("run", SCRIPTS / "tiny.py", "--servers", "2", "--workers", "2"),
    ).check()
    report = json.loads((place.work / "report.json").read_text())
    assert report["problems"] == []
    assert [len(fault["struck"]) for fault in report["faults"]] == [1] * 5
    assert [fault["struck"][0]["who"] for fault in report["faults"]] == [
        *("worker-1", "worker-0", "server-1", "server-0", "coordinator"),
    ]
    assert report["summary"]["weights_sha256"] == report["twin"]["weights_sha256"]
    assert report["balance"] == 0
    assert "was killed by signal 9" in done.said
    assert done.out.rstrip().endswith("ok")
    assert place.leftovers() == []


@pytest.mark.long
def test_a_plan_that_never_strikes_is_a_failure(place: Place) -> None:
    (place.work / "chaos.toml").write_text('[[fault]]\nat = "worker.after_pull"\nstep = 100000\ndo = "kill"\n')
    done = place.paramserver(
        *("chaos", "--plan", "chaos.toml", "--no-twin", "--"),
        *("run", SCRIPTS / "tiny.py", "--servers", "1", "--workers", "1"),
    ).check(1)
    assert "FAILED: faults that never struck: 1" in done.out
