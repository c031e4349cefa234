"""Real processes: the file of records, alone and under `run`, and logs of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from paramserver.records.file import read
from tests.support.integration.harness import SCRIPTS, Place, place_fixture

TINY = SCRIPTS / "tiny.py"
STEPS = 128  # 2 epochs of 64 slices, 1 slice in a step

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_a_run_and_a_script_alone_write_the_same_curve_and_a_second_run_sets_the_file_aside(place: Place) -> None:
    alone, together = place.work / "alone.jsonl", place.work / "run.jsonl"
    place.python(TINY, environ={"PARAMSERVER_RUN__RECORDS": str(alone)}).check()
    for _ in range(2):
        command = ("run", TINY, "--workers", "2", "--slices-per-step", "1", "--records", "run.jsonl")
        place.paramserver(*command).check()
    curve = [(step.step, step.values) for step in read(alone)]
    assert [step for step, _ in curve] == list(range(STEPS))
    for path in (together, together.with_name("run.jsonl.old-1")):
        assert [(step.step, step.values) for step in read(path)] == curve


def test_with_json_each_line_of_the_log_is_an_object_that_names_its_process(place: Place) -> None:
    environ = {"PARAMSERVER_LOG__FORMAT": "json", "PARAMSERVER_LOG__LEVEL": "debug"}
    done = place.paramserver("run", TINY, "--workers", "2", environ=environ).check()
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert {line["name"] for line in lines} >= {"coordinator"}
    assert all({"timestamp", "level", "role", "event"} <= line.keys() for line in lines)
    assert not [line for line in done.out.splitlines() if "| {" in line], "a line of JSON has no name before it"
