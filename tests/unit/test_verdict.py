"""How a run ends: the exit code follows the promises, and the last line names true facts only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paramserver.checkpoint.place import Place
from paramserver.results.verdict import closing_lines, exit_code, look_at_checkpoint
from paramserver.v1 import coordinator_pb2
from tests.support.unit.checkpoints import save

SUMMARY: dict[str, Any] = {
    "steps": 330,
    "seconds": 2.0,
    "samples": 5940,
    "samples_per_s": 2970.0,
    "metrics": {},
    "weights_sha256": "00ff",
    "steps_skipped": 0,
    "contributions_applied": 660,
    "contributions_not_counted": {},
    "checkpoint": "step-00000330-t1",
    "takeovers": 0,
    "repairs": 0,
    "state": "done",
    "poisoned_slices": [],
    "broken_promises": [],
}
STATUS = coordinator_pb2.StatusResponse()
STATUS.data.slice_size = 9


def test_all_is_kept() -> None:
    assert exit_code(SUMMARY) == 0
    last = closing_lines(STATUS, SUMMARY)[-1]
    assert last == (
        "everything promised is there: 330 steps, 5940 samples counted once, 0 contributions not counted, "
        "last checkpoint step-00000330-t1"
    )


def test_a_small_value_is_shown_with_the_digits_that_count() -> None:
    first = closing_lines(STATUS, {**SUMMARY, "metrics": {"lr": 0.00001, "loss": 0.5, "wd": 0.00012345}})[0]
    assert first.endswith("loss 0.5000, lr 1e-05, wd 0.0001234")


def test_what_is_not_there_is_not_named() -> None:
    lines = closing_lines(STATUS, {**SUMMARY, "checkpoint": "", "steps_skipped": 2})
    assert "checkpoint" not in lines[-1]
    assert "2 steps skipped" in lines[-1]


def test_what_did_not_count_is_named_with_its_reason() -> None:
    missed = {"duplicate": 2, "late": 1}
    last = closing_lines(coordinator_pb2.StatusResponse(), {**SUMMARY, "contributions_not_counted": missed})[-1]
    assert "660 contributions counted once, 3 contributions not counted (2 brought twice, 1 later than" in last


def test_takeovers_are_named() -> None:
    last = closing_lines(STATUS, {**SUMMARY, "takeovers": 1})[-1]
    assert ", backups took over from a lost server once, last checkpoint" in last
    last = closing_lines(STATUS, {**SUMMARY, "takeovers": 3, "repairs": 2})[-1]
    assert ", backups took over from a lost server 3 times, and all shards had their backups again 2 times," in last


def test_each_broken_promise_is_a_line() -> None:
    broken = {**SUMMARY, "broken_promises": ["the disk was full.", "three pushes are lost."]}
    assert exit_code(broken) == 1
    lines = closing_lines(STATUS, broken)
    assert lines[0].startswith("ended: ")
    assert lines[-2:] == ["promise broken: the disk was full.", "promise broken: three pushes are lost."]
    assert not any("everything promised" in line for line in lines)


def test_the_last_checkpoint_is_looked_at(tmp_path: Path) -> None:
    name = save(Place(str(tmp_path)), 330).name
    assert look_at_checkpoint(str(tmp_path), name, 330) == ""
    assert "the last checkpoint is step-00000330-t1" in look_at_checkpoint(str(tmp_path), name, 331)
    assert "the last checkpoint is none" in look_at_checkpoint(str(tmp_path), "", 0)
    weights = next((tmp_path / name).glob("weights-*"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is not whole" in look_at_checkpoint(str(tmp_path), name, 330)
    shutil.rmtree(tmp_path / name)
    assert "somebody has removed it" in look_at_checkpoint(str(tmp_path), name, 330)


def test_of_many_values_the_closing_line_has_some() -> None:
    few = {f"v{number:02}": float(number) for number in range(8)}
    assert closing_lines(STATUS, {**SUMMARY, "metrics": few})[0].endswith("v06 6.0000, v07 7.0000")
    many = {f"v{number:02}": float(number) for number in range(90)}
    assert closing_lines(STATUS, {**SUMMARY, "metrics": many})[0].endswith("v07 7.0000, and 82 more values")
