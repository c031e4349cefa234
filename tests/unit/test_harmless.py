"""Text of other processes steers no terminal and forges no line, wherever people see it."""

from __future__ import annotations

import ast
import io
import json
import re
import time
from collections.abc import MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import structlog
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console

from paramserver import logs
from paramserver.cli import target
from paramserver.cli.look import ledger as ledger_command
from paramserver.cli.look.facts import describe, render
from paramserver.cli.look.screen import Screen
from paramserver.core import shown
from paramserver.launcher.display import PlainDisplay
from paramserver.launcher.live import LiveDisplay
from paramserver.report.data import Outcome, Report
from paramserver.report.data import Output as LastLines
from paramserver.report.keeper import Keeper
from paramserver.report.writing import rendered
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2
from paramserver.web.facts import ledger_of, status_of

# Sets the title, writes to the clipboard, clears the screen (also with one byte, C1), turns the direction, and begins
# a line that looks like one of ours.
PACKAGE = Path(shown.__file__).parents[1]
EVIL = "a\x1b]52;c;AA==\x07\x1b[2J\x9b2J\u202e\u2066\x00\x7f\r\nFORGED 12:00:00 [info] all is well\u2028FORGED"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def check(text: str, margin: str = " │") -> None:
    """No character steers anything, and no line begins with the text of others behind a ``margin``."""
    assert "a\\x1b]52" in text.replace("\\\\", "\\"), "the text is there"
    assert not (found := FORBIDDEN.search(text)), repr(text[max(0, found.start() - 80) : found.end() + 20])
    assert not any(line.lstrip(margin).startswith("FORGED") for line in text.split("\n"))


def fill(message: Message, depth: int = 0) -> None:
    """Put the evil text into each field that holds text, at any depth; repeated ones get one entry, numbers 1."""
    field: Any
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                _fill_map(message, field)
            elif depth < 4:
                repeated = field.is_repeated
                fill(getattr(message, field.name).add() if repeated else getattr(message, field.name), depth + 1)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(EVIL)
            elif field.name not in ("summary", "role"):
                setattr(message, field.name, EVIL)
        elif field.name in ("term", "begun", "twice"):
            setattr(message, field.name, 1)


def _fill_map(message: Message, field: Any) -> None:
    found = getattr(message, field.name)
    assert isinstance(found, MutableMapping)
    value = field.message_type.fields_by_name["value"]
    if field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING:
        found[EVIL] = EVIL if value.type == FieldDescriptor.TYPE_STRING else 1


def evil_status() -> coordinator_pb2.StatusResponse:
    status = coordinator_pb2.StatusResponse()
    fill(status)
    for role in ("worker", "server", "coordinator"):
        process = status.processes.add()
        fill(process)
        process.role, process.state = role, "training"
    del status.processes[0]
    return status


def evil_ledger() -> coordinator_pb2.AccountsResponse:
    found = coordinator_pb2.AccountsResponse()
    fill(found)
    return found


def drawn(renderable: Any) -> str:
    screen = io.StringIO()
    Console(file=screen, width=4000, force_terminal=False).print(renderable)
    return screen.getvalue()


def test_status_as_a_table() -> None:
    check(drawn(render(describe(evil_status()))))


def test_top() -> None:
    screen = Screen()
    screen.heard(evil_status(), "12:00")
    other = evil_status()
    other.processes[0].state, other.processes[0].address = "failed", "b" + EVIL
    screen.heard(other, "12:01")
    check(drawn(screen.draw(200)))


def test_the_view_of_the_launcher() -> None:
    with redirect_stdout(io.StringIO()):
        display = LiveDisplay()
        display.update(evil_status())
        display.line("", EVIL)
        display.close()
        assert display._status is not None
    check(drawn(display.table(display._status)))


def test_the_lines_of_the_launcher() -> None:
    told = io.StringIO()
    with redirect_stdout(told):
        display = PlainDisplay(-1.0)
        display.update(evil_status())
        display.line("", EVIL)
    check(told.getvalue())


@pytest.mark.parametrize("format_", ["html", "md", "json"])
def test_a_report(format_: str) -> None:
    keeper = Keeper()
    keeper.hear(evil_status())
    keeper.hear_ledger(evil_ledger())
    empty = Report(job=EVIL, made_at_s=time.time(), outcome=Outcome(kind="failed", sentence=EVIL))
    report = keeper.report(empty).model_copy(
        update={"output": [LastLines(name=EVIL, lines=[EVIL])], "missing": [EVIL], "summary": {EVIL: [EVIL]}}
    )
    check(rendered(report, format_))


def test_the_api() -> None:
    for answer in (status_of(evil_status()), ledger_of(evil_ledger())):
        check(answer.model_dump_json())


@pytest.mark.parametrize("arguments", [{}, {"slices": True}, {"json_": True}])
def test_the_ledger(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    monkeypatch.setattr(target, "call_coordinator", lambda *given: evil_ledger())
    monkeypatch.setattr(ledger_command, "find_target", lambda where: target.Target("a:1", Security.open()))
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        assert ledger_command.ledger(**arguments) == 5
    check(told.getvalue())


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    for name in ("logging.lastResort", "warnings.showwarning", "sys.excepthook", "threading.excepthook"):
        monkeypatch.setattr(name, None)  # a log in JSON takes these over
    told = io.StringIO()
    with redirect_stderr(told):
        structlog.reset_defaults()
        logs.configure("debug", form)
        try:
            _log_everything()
        finally:
            logs.begin_anew()
    check(told.getvalue() if form == "json" else _without_last_words(told.getvalue()), margin="")
    if form == "json":
        assert all(json.loads(line) for line in told.getvalue().splitlines())


def _log_everything() -> None:
    logger = structlog.get_logger("paramserver")
    logger.warning(EVIL, why=EVIL, many=[EVIL], **{EVIL: EVIL})
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        logger.exception("it failed")
        logs.show_exception(error, error.__traceback__)
    logs.complain(f"paramserver: error: {EVIL}")


def _without_last_words(text: str) -> str:
    """The traceback with which a process ends is shown as Python shows it, with the lines of its error."""
    begin = text.index("\nTraceback (most recent call last)")
    end = text.index("paramserver: error:")
    assert not FORBIDDEN.search(text[begin:end])
    return text[:begin] + text[end:]


@pytest.mark.parametrize("text", ["plain", "käse · 3 µs …", "日本語", "a\tb", "", "12 %"])
def test_other_text_stays(text: str) -> None:
    assert shown.lines(text) == text
    assert shown.one_line(text) == text.replace("\t", "\\t")


def test_commands_print_by_one_function() -> None:
    """`tell` of `cli.common` makes each text harmless. ``logs`` prints the output of scripts, which is the user's."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in (PACKAGE / "cli").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert found == {"cli/common.py", "cli/look/logs.py"}
