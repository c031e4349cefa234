"""Reports of real runs: with a killed worker in both modes, of a script that fails, of a running job, in a browser."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.report.files import read_files
from paramserver.report.html import data_in
from paramserver.report.writing import write_report
from tests.support.integration.browser import Browser
from tests.support.integration.harness import SCRIPTS, Place, place_fixture, until
from tests.support.unit.runs import MARKUP, run, slowed

TRAIN = SCRIPTS / "train.py"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def digest(said: str) -> str:
    found = re.search(r"weights sha256 (\w+)", said)
    assert found is not None, said
    return found[1]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_report_of_a_run_with_a_killed_worker(mode: str, place: Place, tmp_path: Path) -> None:
    """It says who died and came back. A second run in the directory replaces it."""
    path = place.work / "report.html"
    words = ("run", TRAIN, "--mode", mode, "--report", "report.html")
    killed = ("--", "--epochs", "4", "--pace", "0.1", "--misbehave", "1:10:kill", "--once", tmp_path / "killed")
    done = place.paramserver(*words, "--workers", "2", *killed).check()
    assert "\nreport report.html\n" in done.out
    report = read_files([path])
    assert (report.outcome.kind, report.outcome.exit_code) == ("done", 0)
    assert report.summary["weights_sha256"] == digest(done.out)
    lost = [event.subject for event in report.events if event.kind == "lost"]
    assert report.summary["losses"] == report.status["losses"] == 1
    assert lost == ["worker-1"]
    (loss,) = [curve for curve in report.curves if curve.name == "loss"]
    assert len(loss.points) > (25 if mode == "sync" else 10)
    assert max(moment.samples_per_s for moment in report.moments) > 0
    assert report.ledger is not None
    assert [(epoch.once, epoch.twice, epoch.never) for epoch in report.ledger.epochs] == [(230, 0, 0)] * 4
    origins = {one.key: one.origin for one in report.settings}
    assert (origins["consistency.mode"], origins["training.seed"]) == ("flag", "default")
    assert {"paramserver", "torch", "python"} <= report.versions.keys()
    assert report.host

    text = place.paramserver("report", path).check().out
    assert "worker-1 is lost" in text
    assert digest(done.out) in text
    again = place.paramserver(*words, "--workers", "1", "--", "--epochs", "1").check()
    assert data_in(path.read_text())["summary"]["weights_sha256"] == digest(again.out)
    assert sorted(one.name for one in place.work.iterdir()) == ["report.html", "state"], "the latter has checkpoints"


@pytest.mark.long
def test_a_report_of_a_script_that_fails_says_why(place: Place) -> None:
    done = place.paramserver(
        "run", TRAIN, "--workers", "2", "--report", "r.md", "--", "--epochs", "3", "--misbehave", "0:5:raise"
    )
    assert done.code == 1
    text = (place.work / "r.md").read_text()
    assert "▲ failed" in text
    assert "worker-0 failed with exit code 1" in text
    assert 'raise RuntimeError("the cat sat on the keyboard")' in text
    assert "### Ledger" in text


@pytest.mark.long
def test_reports_of_a_running_job_and_of_an_interrupted_one(place: Place) -> None:
    running = place.launch(
        "run", TRAIN, "--workers", "1", "--report", "end.json", "--", "--epochs", "99", "--pace", "0.05"
    )
    running.wait_for("coordinator at")

    def told() -> Any:
        done = place.paramserver("report", "-o", "now.json")
        report = read_files([place.work / "now.json"]) if done.code == 0 else None
        return report if report is not None and any(curve.points for curve in report.curves) else None

    report = until("curves", told, 100.0)
    assert report.outcome.kind == "running"
    assert report.settings
    running.send(signal.SIGINT)
    assert running.wait().code == 130
    ended = read_files([place.work / "end.json"])
    assert ended.outcome.sentence == "The run was interrupted by SIGINT."
    assert ended.curves


@pytest.mark.long
def test_a_browser_shows_the_page_offline_and_names_as_text(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    known = run(MARKUP, status=slowed(), job=MARKUP)
    curves = [*known.curves, known.curves[0].model_copy(update={"name": MARKUP})]
    write_report(page, known.model_copy(update={"curves": curves}))
    with Browser(tmp_path / "profile") as browser:
        for width in (1366, 390):
            browser.open(page.as_uri(), width, 900, dark=width == 390)
            until("the page", lambda: "done" in browser.text(".badge"), 30.0)
            assert browser.value("document.images.length") == 0
            assert browser.value("document.title").startswith("Job <img")
            assert browser.text("h1") == f"Job {MARKUP}"
            assert browser.value("document.querySelectorAll('.charts svg').length") == 4
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert {address.split(":")[0] for address in browser.requests} == {"file"}
        assert browser.complaints == []
