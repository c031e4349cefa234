"""What a launcher says at the end of a run: to the page and to the list of past runs, and what the list shows."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from paramserver.cli.look.dashboard import dashboard
from paramserver.cli.target import Where
from paramserver.config import load_settings
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.errors import UnavailableError
from paramserver.launcher.reporting import Reporting
from paramserver.machine import past
from paramserver.machine.past import PastRun, keep_run, past_runs

LINES = ["done: sync, 64 steps in 8.1 s", "everything promised is there: 64 steps"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of this user lie. There is nothing yet, and no job runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))
    return tmp_path / "state"


def run(number: int = 1, name: str = "digits", report: str = "") -> PastRun:
    return PastRun(name, float(number), number + 9.0, "paramserver run train.py", "/work", 0, "done: 64 steps", report)


class Told:
    """A coordinator that notes what it is told."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []

    async def call(self, method: str, request: Any, timeout: float) -> None:
        self.got.append((method, request))


def tell(code: int, lines: list[str], coordinator: Any = None, **overrides: object) -> None:
    settings = load_settings(overrides={"cluster.job": "digits", **overrides})
    asyncio.run(Reporting(settings).tell(code, lines, coordinator, 1.0))


@pytest.mark.parametrize(
    ("code", "lines", "state", "result"),
    [
        (0, LINES, "done", "done: sync, 64 steps in 8.1 s"),
        (0, ["stopped: sync, 9 steps in 1.0 s"], "stopped", "stopped: sync, 9 steps in 1.0 s"),
        (143, ["stopped by SIGTERM"], "stopped", "stopped: stopped by SIGTERM"),
        (1, ["ended: sync", "promise broken: the disk is full"], "failed", "failed: the disk is full"),
        (
            3,
            ["worker-0 failed with exit code 3; the run ends"],
            "failed",
            "failed: worker-0 failed with",
        ),
    ],
)
def test_the_page_and_the_list_hear_how_a_run_has_ended(code: int, lines: list[str], state: str, result: str) -> None:
    coordinator = Told()
    tell(code, lines, coordinator)
    ((method, request),) = coordinator.got
    assert (method, request.state, list(request.said)) == ("Coordinator.Stop", state, lines)
    (kept,) = past_runs()
    assert (kept.name, kept.code) == ("digits", code)
    assert kept.result.startswith(result)


def test_nobody_else_can_read_past_runs_and_no_secret_is_in_them(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paramserver", "run", "train.py", "--store", "redis://:secret-word@db:6379"])
    tell(0, LINES, **{"cluster.store": "redis://:secret-word@db:6379"})
    (path,) = files.rglob("*.json")
    assert "secret-word" not in path.read_text()
    assert "redis://:***@db" in past_runs()[0].command
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_newest_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "_KEPT", 3)
    for number in (1, 20, 3, 400, 5):
        keep_run(run(number))
    assert [one.began_s for one in past_runs()] == [400.0, 20.0, 5.0]
    assert past_runs("letters") == []


def test_a_run_is_not_kept_where_this_user_can_write_nothing(files: Path) -> None:
    files.write_text("a file, not a directory")
    keep_run(run())
    assert past_runs() == []


def test_dashboard_without_a_job_lists_past_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnavailableError, match="no job runs on this machine"):
        dashboard()
    there = tmp_path / "report.html"
    there.touch()
    keep_run(run(1, "digits", str(there)))
    keep_run(run(2, "letters", "/nowhere.html"))
    assert dashboard() == 0
    out = capsys.readouterr().out
    assert out.index("letters") < out.index("digits")
    assert "paramserver run train.py  (in /work)" in out
    assert f"report {there}\n" in out
    assert "report /nowhere.html, which is not there any more" in out
    assert dashboard(where=Where(job="digits")) == 0
    assert "letters" not in capsys.readouterr().out
    with pytest.raises(UnavailableError):
        dashboard(token=True)
    with pytest.raises(UnavailableError):
        dashboard(where=Where(job="numbers"))


def test_a_run_that_is_refused_before_its_coordinator_answers_has_a_report(tmp_path: Path) -> None:
    """Before, a used checkpoint directory with --report ended in a traceback."""
    path = tmp_path / "report.json"
    why = "ckpt holds checkpoints of job digits: go on from them with --resume ckpt"
    reporting = Reporting(load_settings(overrides={"run.report": str(path), "cluster.job": "digits"}))
    assert asyncio.run(reporting.broken_off(2, why, None, tmp_path, [])) == f"report {path}"
    assert why in path.read_text()
