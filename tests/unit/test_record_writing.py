"""The file of records, and the threads that write to it and to trackers."""

from __future__ import annotations

import errno
import json
import os
import threading
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from paramserver import errors
from paramserver.config import Run
from paramserver.coordinator.watching.records import Records
from paramserver.core.records.history import POINTS
from paramserver.core.records.steps import REMEMBERED, StepValues
from paramserver.records import file, writing
from paramserver.records.file import RecordsFile
from paramserver.records.opening import check_records
from paramserver.records.writing import Writing


def at(step: int, loss: float, timeline: int = 0) -> StepValues:
    return StepValues(step, timeline, {"loss": loss}, 0)


def write(path: Path, *steps: StepValues, beginning: int = 1, resumed: bool = False) -> None:
    records = RecordsFile(path, "job", beginning, resumed)
    records.open()
    for step in steps:
        records.log(step, 1000.0)
    records.close()


def losses(path: Path) -> list[tuple[int, float]]:
    return [(step.step, step.values["loss"]) for step in file.read(path)]


# ---- the file


def test_a_line_for_each_step_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    write(path, at(0, 0.5), StepValues(1, 0, {"a": nan, "b": inf, "c": -inf}))
    head, first, second = (
        json.loads(line, parse_constant=lambda text: pytest.fail(text)) for line in path.read_text().splitlines()
    )
    assert head == {"paramserver": "records 1", "job": "job", "beginning": "1"}
    assert first == {"step": 0, "epoch": 0, "timeline": 0, "time": 1000.0, "values": {"loss": 0.5}}
    assert second["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    found = file.read(path)[1].values
    assert isnan(found["a"])
    assert (found["b"], found["c"]) == (inf, -inf)


def test_another_coordinator_of_the_job_goes_on_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, at(0, 1.0), at(1, 2.0))
    with path.open("a") as half:
        half.write('{"step": 2, "tim')
    earlier = RecordsFile(path, "job", 1, False).earlier()
    assert (earlier.steps, earlier.ours) == ([at(0, 1.0), at(0, 1.0), at(1, 2.0)], True)
    assert [(point.step, point.value) for point in earlier.history.points("loss")] == [(0, 1.0), (1, 2.0)]
    write(path, at(2, 3.0))
    assert losses(path) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]] == [0, 1, 2]


def test_going_back_voids_what_was_later(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, at(0, 1.0), at(1, 1.0), at(2, 1.0), at(1, 7.0, timeline=1))
    assert losses(path) == [(0, 1.0), (1, 7.0)]


def test_late_names_of_a_step_join_it(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, at(0, 1.0), StepValues(0, 0, {"accuracy": 0.5}))
    assert file.read(path)[0].values == {"loss": 1.0, "accuracy": 0.5}


def test_another_job_sets_the_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for beginning in (1, 2, 3):
        write(path, at(0, float(beginning)), beginning=beginning)
    assert losses(path) == [(0, 3.0)]
    assert losses(tmp_path / "records.jsonl.old-1") == [(0, 1.0)]
    assert losses(tmp_path / "records.jsonl.old-2") == [(0, 2.0)]


def test_a_long_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """The coordinator that takes over keeps as much as the former one did."""
    path = tmp_path / "records.jsonl"
    write(path, *(at(step, 1.0) for step in range(9000)), *(at(step, 2.0, timeline=1) for step in range(4000, 8000)))
    earlier = RecordsFile(path, "job", 1, False).earlier()
    assert earlier.steps[0].step == 4000, "where the newest timeline begins"
    assert [one.step for one in earlier.steps[1:]] == list(range(8000 - REMEMBERED, 8000))
    points = earlier.history.points("loss")
    assert len(points) <= POINTS
    assert [point.value for point in points] == [1.0 if point.step < 4000 else 2.0 for point in points]
    assert points[-1].step == 7999
    alone = Records(cast(Any, None))
    alone.history.add(at(8000, 3.0, timeline=1), 9.0)
    alone.go_on(earlier.history, earlier.steps)
    assert alone.history.points("loss")[-1].step == 8000


def test_half_a_line_is_removed_however_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, at(0, 1.0))
    with path.open("a") as half:
        half.write('{"step": 2, "tim' + "e" * 200_000)
    write(path, at(1, 3.0))
    assert losses(path) == [(0, 1.0), (1, 3.0)]


def test_a_resumed_job_goes_on_with_the_file_from_its_first_step(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, *(at(step, 1.0, timeline=5) for step in range(4)))
    assert RecordsFile(path, "again", 2, True).earlier().ours is False
    write(path, at(2, 9.0, timeline=3), beginning=2, resumed=True)
    assert losses(path) == [(0, 1.0), (1, 1.0), (2, 9.0)]


@pytest.mark.parametrize("content", ["print('my script')\n", '{"step": 1}\n', "\n"])
def test_a_file_that_holds_something_else_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(content)
    with pytest.raises(errors.UserError, match="is no file of records: name another file"):
        check_records(Run(records=str(path)))
    assert path.read_text() == content


def test_what_cannot_be_written_or_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UserError, match=r"run\.records cannot be written to"):
        check_records(Run(records=str(tmp_path)))
    monkeypatch.setattr("paramserver.records.opening.find_spec", lambda module: None)
    with pytest.raises(errors.UserError, match=r"the package wandb is not installed here.* pip install wandb"):
        check_records(Run(track="wandb"))


# ---- the threads


class Fails:
    """A tracker that fails at a step."""

    name = "failing"

    def __init__(self, where: str) -> None:
        self.where = where
        self.steps: list[int] = []

    def open(self) -> None:
        if self.where == "open":
            raise SystemExit("no\nnetwork")

    def log(self, step: StepValues, at: float) -> None:
        if self.where == "log" and step.step == 1:
            raise RuntimeError("no\nnetwork")
        self.steps.append(step.step)

    def close(self) -> None:
        if self.where == "close":
            raise OSError("no\nnetwork")


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_tracker_that_fails_says_one_sentence_and_delays_nobody(where: str) -> None:
    failing, well = Fails(where), Fails("")
    with structlog.testing.capture_logs() as said:
        opened = Writing([failing, well])
        for step in range(4):
            opened.write([at(step, 1.0)])
        opened.close()
    assert well.steps == [0, 1, 2, 3]
    assert [line["event"] for line in said] == [
        "failing takes no more logged values, and training goes on without it: no network"
    ]


def test_a_file_that_misses_values_is_a_broken_promise() -> None:
    """A tracker is not: other people keep it."""
    missed: list[str] = []
    opened = Writing([Fails("open")], Fails("log"), missed.append)
    for step in range(4):
        opened.write([at(step, 1.0)])
    opened.close()
    assert missed == ["failing does not have all logged values: no network"]


def test_a_file_that_is_deleted_is_a_broken_promise(tmp_path: Path) -> None:
    """Before, all later values went into the deleted file, and nobody said so."""
    path, missed = tmp_path / "records.jsonl", list[str]()
    opened = Writing([], RecordsFile(path, "job", 1, False), missed.append)
    opened.write([at(0, 1.0)])
    opened.settle()
    assert missed == []
    path.unlink()
    opened.write([at(1, 1.0)])
    opened.settle()
    opened.close()
    assert missed == [f"the file {path} does not have all logged values: it was deleted while the job wrote to it"]


def test_settling_waits_for_the_file_and_not_for_trackers() -> None:
    missed: list[str] = []
    hanging, promised = Hangs(), Fails("")
    opened = Writing([hanging], promised, missed.append)
    opened.write([at(step, 1.0) for step in range(100)])
    opened.settle()
    assert promised.steps == list(range(100))
    assert missed == []
    hanging.released.set()
    opened.close()


@pytest.mark.parametrize("where", ["open", "log"])
def test_a_file_that_fails_at_its_last_steps_is_known_when_it_has_settled(where: str) -> None:
    missed: list[str] = []
    opened = Writing([], Fails(where), missed.append)
    opened.write([at(step, 1.0) for step in range(3)])
    opened.settle()
    assert missed == ["failing does not have all logged values: no network"]
    opened.settle()
    opened.close()


def test_a_file_that_hangs_misses_values() -> None:
    missed: list[str] = []
    hanging = Hangs()
    opened = Writing([], hanging, missed.append)
    opened.write([at(0, 1.0)])
    opened.settle(timeout_s=0.05)
    hanging.released.set()
    opened.close()
    assert missed == ["hanging does not have all logged values: it does not take them within some seconds"]


def test_a_disk_that_is_full_is_noticed_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    with pytest.raises(errors.UserError, match=r"run\.records cannot be written to .*: No space left on device"):
        check_records(Run(records=str(tmp_path / "records.jsonl")))


class Hangs(Fails):
    """A tracker that does not return."""

    name = "hanging"

    def __init__(self) -> None:
        super().__init__("")
        self.released = threading.Event()

    def open(self) -> None:
        self.released.wait(30.0)


def test_a_tracker_that_hangs_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "WAITING", 3)
    hanging, well = Hangs(), Fails("")
    with structlog.testing.capture_logs() as said:
        opened = Writing([well, hanging])
        for step in range(6):
            opened.write([at(step, 1.0)])
        opened.close(timeout_s=0.3)
    hanging.released.set()
    assert [line["event"].partition(",")[0] for line in said if line["event"].startswith("hanging")] == [
        "hanging is too slow for the logged values",
        "hanging has not taken all logged values within 0.3 s: some are lost",
    ]
