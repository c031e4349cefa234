"""The files with the result of a run: written whole, or refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramserver import errors
from paramserver.config import Run
from paramserver.report.writing import check_report
from paramserver.results.collect import Result
from paramserver.results.summary import check_writable, write_summary
from paramserver.results.verdict import broken_untrained

NOTHING = Result(3, cast("Any", SimpleNamespace(placements=(), tensors=())), [], {})


def test_weights_that_cannot_be_written_are_one_sentence() -> None:
    """The writer of safetensors has an error of its own, which is no OSError."""
    with pytest.raises(errors.UserError, match=r"the weights cannot be written to /proc/m: No such file or directory"):
        NOTHING.save(Path("/proc/m"))


def test_a_summary_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(errors.UserError, match=r"the summary cannot be written to .*: No space left on device"):
        write_summary(tmp_path / "s.json", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["summary", "save"])
def test_nothing_but_a_file_is_replaced(setting: str, tmp_path: Path) -> None:
    """As root, a summary in the place of /dev/null would be the end of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(errors.UserError, match=rf"run\.{setting} is {pipe}, which is a device or the like"):
        check_writable(Run.model_validate({setting: str(pipe)}))
    assert pipe.is_fifo()


def test_a_report_replaces_no_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.md"
    os.mkfifo(pipe)
    with pytest.raises(errors.UserError, match=r"run\.report is .*, which is a device or the like: name a file"):
        check_report(pipe)


def test_files_of_a_job_that_has_not_trained() -> None:
    assert broken_untrained(Run()) == []
    assert broken_untrained(Run(save="m.safetensors", summary="s.json")) == [
        "nothing was trained, so m.safetensors, which run.save names, was not written",
        "nothing was trained, so s.json, which run.summary names, was not written",
    ]
