"""Reports: all that is known is in them, nothing secret, every name is text; a file is whole or not there."""

from __future__ import annotations

import html
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.cli.main import main
from paramserver.config import load_settings
from paramserver.report import chart, outcome
from paramserver.report.data import Curve, CurvePoint, Outcome, Output
from paramserver.report.files import read_files
from paramserver.report.html import data_in, html_of
from paramserver.report.keeper import Keeper
from paramserver.report.markdown import escape, markdown_of
from paramserver.report.secrets import secrets_of, without
from paramserver.report.view import view_of
from paramserver.report.writing import check_report, rendered, write_report
from paramserver.v1 import coordinator_pb2
from paramserver.web.models import Setting
from tests.support.unit.runs import BEGUN_S, MARKUP, SUMMARY, event, run, slowed


class Attributes(HTMLParser):
    """The names of all attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {name for name, _ in attrs}


def test_the_story_of_a_lost_worker() -> None:
    assert view_of(run()).story == [
        "worker-1 is lost: its process is gone (5 s after the begin); it was back after 2.5 s.",
        "Started again: worker-1 once.",
        "Backups took over from a lost server once, and all shards had their backups again once.",
        "No step was done again.",
    ]


def test_the_story_of_a_quiet_run_and_of_one_that_went_back() -> None:
    quiet = {**SUMMARY, "losses": 0, "takeovers": 0, "restarts": {}}
    assert view_of(run(summary=quiet, events=[])).story == ["No process was lost, and no step was done again."]
    back = {**quiet, "rollbacks": 2, "steps_redone": 7}
    assert view_of(run(summary=back, events=[])).story == [
        "The job went back to a checkpoint 2 times; 7 steps were done again."
    ]


def test_facts_of_a_run() -> None:
    view = view_of(run())
    assert dict(view.facts) == {
        "mode": "synchronous",
        "processes": "2 servers, 2 workers",
        "steps": "40",
        "epochs": "2 of 2",
        "time": "12 s",
        "speed": "102 samples/s",
        "loss": "2 → 0.44",
        "accuracy": "2 → 1.84",
        "faults": "1 process lost",
    }
    assert view.counted == "Every sample counted exactly once in each epoch."
    assert ("weights, sha256", "ab" * 32) in view.result.rows
    assert view.changed.rows == [("training.seed", "3", "flag")]
    assert view.defaults.rows == [("log.level", "info", "default")]
    assert [mark.event.kind for mark in view.marks] == ["lost"]


def test_a_failed_run_says_why() -> None:
    failed = run(
        outcome=outcome.broken_off(3, "worker-0 failed with exit code 3; the run ends"),
        summary={},
        status={**run().status, "reason": "the loss is NaN", "broken_promises": {"x": "a sample is missing"}},
        output=[Output(name="worker-0", lines=["Traceback", "ValueError: <b>cat</b>"])],
    )
    for text in (html.unescape(html_of(failed)), markdown_of(failed)):
        assert "The run ended with exit code 3: worker-0 failed with exit code 3." in text
        assert "the loss is NaN" in text
        assert "Promise broken: a sample is missing" in text
        assert "ValueError: <b>cat</b>" in text


@pytest.mark.parametrize(
    ("code", "why", "kind", "sentence"),
    [
        (130, "", "interrupted", "The run was interrupted by SIGINT."),
        (143, "", "interrupted", "The run was interrupted by SIGTERM."),
        (1, "no store answers.", "failed", "The run ended with exit code 1: no store answers."),
        (137, "worker-0 was killed", "failed", "The run ended with exit code 137: worker-0 was killed."),
    ],
)
def test_runs_without_a_result(code: int, why: str, kind: str, sentence: str) -> None:
    assert outcome.broken_off(code, why) == Outcome(kind=kind, sentence=sentence, exit_code=code)  # type: ignore[arg-type]


def test_runs_with_a_result() -> None:
    assert outcome.finished(SUMMARY, 0).sentence == (
        "It made 40 steps in synchronous mode within 12 s and everything promised is there."
    )
    broken = outcome.finished({**SUMMARY, "broken_promises": ["x"]}, 1)
    assert (broken.kind, "1 promise is broken" in broken.sentence) == ("failed", True)
    assert outcome.finished({**SUMMARY, "state": "stopped"}, 0).kind == "stopped"


def test_blame_and_phases_are_shown_when_the_status_has_them() -> None:
    view = view_of(run(status=slowed()))
    assert len(view.worst.rows) == 10
    assert view.worst.rows[0][:4] == ("812", "3.4 s", "worker-1", "its data loader")
    assert view.spent_table.rows[1][:3] == ("worker-1", "30.0 s", "3.0 s")
    for text in (html_of(run(status=slowed())), markdown_of(run(status=slowed()))):
        assert "worker-1 held up 28 of the last 32 steps" in text
        assert "3.1 s of them in its data loader" in text
    assert "The steps that waited longest" not in html_of(run())


def test_html_has_no_markup_of_the_run_and_no_address() -> None:
    known = run(MARKUP, job=MARKUP, host=MARKUP, versions={MARKUP: MARKUP}, missing=[MARKUP, "</script>"])
    curves = [Curve(name=MARKUP, points=known.curves[1].points)]
    events = [*known.events, event(6, "lost", MARKUP, f"{MARKUP} is lost", 22)]
    text = html_of(known.model_copy(update={"curves": curves, "events": events}))
    assert "<img" not in text
    assert text.count("</script>") == 1
    assert html.unescape(text).count(MARKUP) > 10
    parser = Attributes()
    parser.feed(text)
    assert parser.found
    assert not parser.found & {"src", "href", "onerror", "action", "data"}
    assert "url(" not in text.partition("</style>")[0]
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(drawing)


def test_markdown_has_no_markup_of_the_run() -> None:
    text = markdown_of(run(MARKUP, job="a|b\n# c @all #12 `x` [y](http://z)"))
    assert "<img" not in text
    assert "Job a\\|b &#35; c &#64;all &#35;12 \\`x\\` \\[y\\](http://z)" in text
    assert escape("worker_1 _x_") == "worker_1 \\_x\\_"


def test_a_report_is_read_again_from_html_and_json(tmp_path: Path) -> None:
    known = run(curves=[Curve(name="loss", points=[CurvePoint(step=0, at_s=1.0, value=math.inf)])])
    for name in ("a.html", "a.json"):
        write_report(tmp_path / name, known)
        assert read_files([tmp_path / name]) == known
    assert html_of(read_files([tmp_path / "a.html"])) == html_of(known)


def test_a_report_with_very_many_values_stays_small() -> None:
    points = [CurvePoint(step=n, at_s=BEGUN_S + n, value=math.sin(n) / 3) for n in range(2000)]
    text = html_of(run(curves=[Curve(name=f"value {n}", points=points) for n in range(64)]))
    assert len(text) < 1_000_000
    (last,) = {curve["points"][-1]["step"] for curve in data_in(text)["curves"] if "value" in curve["name"]}
    assert last == 1999
    assert len(html_of(run())) < 100_000


def test_a_script_without_ctx_log_has_no_table_of_its_values() -> None:
    assert "<summary>All 2 values</summary>" in html_of(run())
    text = html_of(run(curves=[]))
    assert "samples per second" in text
    assert " values</summary>" not in text


def test_curves_have_gaps_where_values_are_not_finite() -> None:
    drawn = chart.curve([(0, 1.0), (1, math.nan), (2, 3.0), (3, math.inf), (4, 2.0)], "step")
    assert drawn.count("M") == 3
    assert chart.curve([(0, 1.0), (1, math.nan), (2, 2.0)], "step") == ""
    assert "nan" not in chart.curve([(n, 5.0) for n in range(4)], "step")


def test_marks_that_lie_close_share_a_line() -> None:
    lines = [chart.Line(10.0, "1", "a"), chart.Line(10.5, "2", "b"), chart.Line(70.0, "3", "c")]
    drawn = chart.curve([(float(n), float(n)) for n in range(100)], "step", lines)
    assert re.findall(r'text-anchor="middle">([\d,]+)</text></g>', drawn) == ["1,2", "3"]


# ---- what is heard


def status(at_s: float, timeline: int, steps: range, value: float, **more: object) -> coordinator_pb2.StatusResponse:
    points = [{"step": n, "at_s": at_s, "timeline": timeline, "value": value} for n in steps]
    return coordinator_pb2.StatusResponse(
        job="digits",
        term=1,
        state="training",
        events=[{"at_s": at_s, "kind": "joined", "subject": "worker-0", "text": f"joined at {at_s}"}],
        history={"curves": [{"name": "loss", "points": points}], "moments": [{"at_s": at_s, "version": 3}], **more},
    )


def test_a_keeper_adds_up_answers_and_asks_for_what_is_new() -> None:
    keeper = Keeper()
    setting = {"key": "cluster.store", "value": "redis://:hunter2@h/0", "origin": "flag"}
    keeper.hear(status(5.0, 0, range(4), 1.0, settings=[setting], versions={"torch": "2"}, host="h"))
    assert keeper.request().since_s == 5.0
    assert keeper.request(whole=True).since_s == 0.0
    keeper.hear(status(6.0, 1, range(2, 3), 7.0))  # the job went back
    found = keeper.report(run())
    assert [(point.step, point.value) for point in found.curves[0].points] == [(0, 1.0), (1, 1.0), (2, 7.0)]
    assert [one.text for one in found.events] == ["joined at 5.0", "joined at 6.0"]
    assert [one.at_s for one in found.moments] == [5.0, 6.0]
    assert (found.settings[0].value, found.host) == ("redis://:***@h/0", "h")


def test_no_secret_is_in_a_report() -> None:
    settings = load_settings(
        overrides={"cluster.store": "redis://me:hunter%402@h/0"}, environ={"PARAMSERVER_SECURITY__TOKEN": "t" * 40}
    )
    told = run(missing=["hunter%402", "hunter@2", "t" * 40], status={**run().status, "reason": f"no {'t' * 40}"})
    text = rendered(without(told, secrets_of(settings)), "html")
    assert not re.search(r"hunter|t{40}", text)
    assert "***" in text


# ---- files


def test_an_earlier_report_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    for name in ("a.html", "a.md", "a.json"):
        path = tmp_path / name
        check_report(path)
        assert not path.exists()
        write_report(path, run())
        check_report(path)
        path.write_text("mine")
        with pytest.raises(errors.UserError, match="exists and is no report: name another file"):
            check_report(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "a.md"]


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.html"
    write_report(path, run())
    before = path.read_text()

    def full(self: Path, text: str, **_: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(errors.UserError, match="No space left on device"):
        write_report(path, run(job="other"))
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a.pdf", "must end with .html, .md or .json"),
        ("there/a.html", "cannot be written to .*: Not a directory|File exists"),
        ("directory.html", "cannot be written to .*: Is a directory"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused_before_the_run(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    (tmp_path / "directory.html").mkdir()
    with pytest.raises(errors.UserError, match=problem):
        check_report(tmp_path / name)


def test_the_command_makes_a_report_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, records, page = tmp_path / "s.json", tmp_path / "r.jsonl", tmp_path / "r.html"
    summary.write_text(json.dumps(SUMMARY))
    lines = [{"step": n, "timeline": 0, "values": {"loss": 1.0 / (n + 1)}} for n in range(5)]
    head = {"paramserver": "records 1", "job": "digits", "beginning": "1"}
    records.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    assert main(["report", str(summary), str(records), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"report {page}\n"
    assert main(["report", str(page)]) == 0
    text = capsys.readouterr().out
    assert "| loss | █▄▂▁▁ | 1 | 0.2 |" in text
    assert "ab" * 32 in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("hello", "is neither a report, a summary"),
        ('{"a": 1}', "is neither a report, a summary"),
        ('{"paramserver": "records 1", "job": "j", "beginning": "1"}\n', "give its summary, too"),
        ('{"paramserver": "report 9"}', "another version of paramserver"),
    ],
)
def test_files_that_are_no_reports(
    content: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_does_not_begin_if_its_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit(9)")
    for name, problem in (("train.py", "must end with"), ("/proc/nowhere/r.html", "run.report cannot be written to")):
        assert main(["run", "train.py", "--report", name]) == 2
        assert problem in capsys.readouterr().err


class Answers:
    """A coordinator that is asked over the network."""

    def __init__(self, term: int = 1) -> None:
        self._term = term

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        if method == "Coordinator.Ledger":
            return coordinator_pb2.AccountsResponse(version=3, epochs=[{"epoch": 0, "samples": 9, "once": 9}])
        assert request.report
        assert request.events
        return coordinator_pb2.StatusResponse(
            job="digits",
            term=self._term,
            state="training",
            reason="" if self._term else "this coordinator stands by",
            processes=[{"role": "worker", "name": "worker-0", "samples": 5}],
            history={"curves": [{"name": "loss", "points": [{"step": 0, "at_s": 1.0, "value": 0.5}]}]},
        )


def test_the_command_asks_a_running_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.cli.train.report.find_target", lambda where: Answers())
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert "Job digits: … running" in text
    assert "is training in" in text
    assert "| loss |" in text
    assert "| 1 | 9 | 9 | 0 | 0 | 0 |" in text
    monkeypatch.setattr("paramserver.cli.train.report.find_target", lambda where: Answers(term=0))
    assert main(["report"]) == errors.UnavailableError.exit_code
    assert "no coordinator leads job digits: this coordinator stands by" in capsys.readouterr().err


def saved(path: Path, found: Any) -> Path:
    write_report(path, found)
    return path


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(name: str, lr: str, last: float, **summary: Any) -> Any:
        curves = [Curve(name="loss", points=[CurvePoint(step=n, at_s=0.0, value=v) for n, v in ((0, 2.0), (1, last))])]
        settings = [Setting(key="training.seed", value="0", origin="default", description="")]
        settings.append(Setting(key="run.args", value=lr, origin="flag", description=""))
        return run(job=name, summary={**SUMMARY, "job": name, **summary}, curves=curves, settings=settings)

    one = saved(tmp_path / "one.html", made("first", "('--lr', '0.1')", 0.5))
    more = {"workers": 4, "seconds": 7.0, "weights_sha256": "00" * 32}
    other = saved(tmp_path / "other.json", made("second", "('--lr', '0.2')", 0.25, **more))
    assert main(["report", str(one), str(other)]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert ["processes", "2 servers, 2 workers", "2 servers, 4 workers"] in rows
    assert ["time", "12 s", "7 s"] in rows
    assert ["loss", "█▁", "█▁", "0.5", "0.25", "-0.25"] in rows
    assert ["run.args", "('--lr', '0.1')", "('--lr', '0.2')"] in rows
    assert not [row for row in rows if row[0] == "training.seed"], "only settings that differ"
    assert ["- The weights differ."] in rows
    assert main(["report", str(one), str(one), "-o", str(tmp_path / "both.md")]) == 0
    text = (tmp_path / "both.md").read_text()
    assert "The weights have the same bits." in text
    assert "Settings that differ" not in text


def test_two_summaries_are_compared_and_other_pairs_and_formats_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summaries = [tmp_path / "one.json", tmp_path / "other.json"]
    for path in summaries:
        path.write_text(json.dumps(SUMMARY))
    names = [str(path) for path in summaries]
    assert main(["report", *names]) == 0
    said = capsys.readouterr().out
    assert "The weights have the same bits." in said
    assert "Settings: a summary does not have them" in said
    for arguments in (["-o", str(tmp_path / "x.html")], ["--format", "json"]):
        assert main(["report", *names, *arguments]) == 2
        assert "two runs are compared as Markdown" in capsys.readouterr().err
    whole = saved(tmp_path / "whole.html", run())
    assert main(["report", names[0], str(whole)]) == 2
    assert "two reports to compare two runs" in capsys.readouterr().err
