"""How doctor runs its checks and prints what they find: in order, with deadlines, never as a traceback."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from paramserver.cli.prepare import doctor as command
from paramserver.cli.prepare.doctor import doctor, lines
from paramserver.doctor.finding import (
    Check,
    Finding,
    Level,
    clean,
    is_writable_directory,
    listing,
    run_checks,
    sentence,
)
from paramserver.errors import ConfigError

GOOD = Finding("good", Level.OK, "fine")
NOTED = Finding("noted", Level.NOTE, "as it is")
WARNED = Finding("warned", Level.WARN, "2 differ\n  a  1  2\n  b  3  4", "make them equal")
FAILED = Finding("failed", Level.FAIL, "gone", "bring it back")


def test_findings_come_in_the_order_of_the_checks() -> None:
    ended = threading.Event()

    async def quick() -> list[Finding]:
        ended.set()
        return [NOTED, WARNED]

    def slow() -> Finding:
        assert ended.wait(30.0)
        return GOOD

    assert run_checks([Check("slow", slow), Check("quick", quick)]) == [GOOD, NOTED, WARNED]


def test_a_check_that_crashes_fails_with_its_reason_and_the_others_go_on() -> None:
    def crash() -> Finding:
        raise ZeroDivisionError("a text of strangers, with password hunter2")

    def refuse() -> Finding:
        raise ConfigError("ours may be shown")

    async def crash_later() -> Finding:
        raise FileNotFoundError(2, "No such file or directory", "/proc/nothing")

    crashed, refused, later, good = run_checks(
        [
            Check("crash", crash),
            Check("refuse", refuse),
            Check("later", crash_later),
            Check("good", lambda: GOOD),
        ]
    )
    assert (crashed.check, crashed.level) == ("crash", Level.FAIL)
    assert crashed.value.startswith("the check broke off: ZeroDivisionError at test_doctor_finding.py:")
    assert "hunter2" not in str(crashed)
    assert refused.value == "the check broke off: ours may be shown"
    assert later.value == "the check broke off: No such file or directory: /proc/nothing"
    assert good is GOOD


def test_a_check_that_hangs_fails_at_its_deadline() -> None:
    release = threading.Event()
    entered = threading.Event()

    def hang() -> Finding:
        entered.set()
        release.wait()
        return GOOD

    async def hang_too() -> Finding:
        await asyncio.Event().wait()
        return GOOD

    first, second = run_checks([Check("disk", hang, deadline_s=0.05), Check("net", hang_too, deadline_s=0.05)])
    assert entered.is_set()
    release.set()
    assert (first.level, first.value) == (Level.FAIL, "no result within 0.05 s")
    assert (second.check, second.level) == ("net", Level.FAIL)
    assert first.remedy


def test_lines_for_pipes_have_a_remedy_beside_and_a_table_below() -> None:
    assert lines([GOOD, WARNED, FAILED]) == [
        "ok    good    fine",
        "warn  warned  2 differ  → make them equal",
        "                a  1  2",
        "                b  3  4",
        "fail  failed  gone  → bring it back",
        "1 failed, 1 to be looked at, of 3 checks",
    ]
    assert lines([GOOD, NOTED])[-1] == "all is well: 2 checks"


@pytest.mark.parametrize(
    ("findings", "code"),
    [([GOOD, NOTED], 0), ([GOOD, WARNED], 1), ([FAILED, GOOD], 1)],
    ids=["notes do not count", "warning", "failure"],
)
def test_exit_code_is_0_only_when_all_is_well(
    findings: list[Finding], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda _: findings)
    assert doctor() == code
    assert capsys.readouterr().out.splitlines() == lines(findings)
    assert doctor(json_=True) == code
    shown = json.loads(capsys.readouterr().out)
    assert [list(line) for line in shown] == [["check", "level", "value", "remedy"]] * len(findings)
    assert shown[0]["level"] == findings[0].level


def test_a_table_for_terminals_shows_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda _: [GOOD, WARNED])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert doctor() == 1
    out = capsys.readouterr().out
    for text in ("what to do", "warned", "a  1  2", "make them equal", "0 failed, 1 to be looked at"):
        assert text in out


def test_texts_from_elsewhere_are_harmless() -> None:
    assert clean("a\x1b[31mb\nc\x00") == "a [31mb c "
    assert len(clean("x" * 10_000)) == 500
    assert listing([f"n{index}" for index in range(5)], most=3) == "n0, n1, n2 and 2 more"


def test_a_sentence_becomes_what_is_the_case_and_what_to_do() -> None:
    found = sentence("token", Level.FAIL, 'token "t" can be read by others; run: chmod 600 "t"')
    assert (found.value, found.remedy) == ('token "t" can be read by others', 'run: chmod 600 "t"')
    found = sentence("store", Level.WARN, "the store at h:1 is a replica: point cluster.store to the primary")
    assert (found.value, found.remedy) == ("the store at h:1 is a replica", "point cluster.store to the primary")
    assert sentence("x", Level.FAIL, "it is gone", "look for it").remedy == "look for it"


def test_a_directory_that_takes_no_file_is_told(tmp_path: Path) -> None:
    assert is_writable_directory(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert is_writable_directory(tmp_path / "absent").startswith("No such file or directory")
