"""Lines for people, and one JSON object per line elsewhere; each says which process it is from, and at which step."""

from __future__ import annotations

import ast
import errno
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from paramserver import logs

PACKAGE = Path(logs.__file__).parent
# Keys of every line, which no message may use for something else.
COMMON = ("timestamp", "level", "role", "name", "step", "event")


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log takes over what Python and libraries print: put back afterwards."""
    for owner, name in (
        (sys, "excepthook"),
        (threading, "excepthook"),
        (warnings, "showwarning"),
        (logging, "lastResort"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    structlog.reset_defaults()
    logs.configure("info")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_have_role_name_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "worker")
    logger = structlog.get_logger("paramserver.worker")
    logger.info("waiting for\nothers", left=3)
    logs.known_as("worker-3", lambda: 812)
    logger.warning("a message", name="of something else")
    logger.debug("too unimportant")
    first, second = lines(capsys)
    assert first.pop("timestamp").endswith("Z")
    assert first == {"level": "info", "role": "worker", "event": "waiting for\nothers", "left": 3}
    assert (second["role"], second["name"], second["step"]) == ("worker", "worker-3", 812)
    assert second["name_"] == "of something else"


def test_a_step_that_cannot_be_told_now_does_not_cost_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "server")
    logs.known_as("server-0", lambda: {}["nothing yet"])  # type: ignore[index]
    structlog.get_logger().info("here")
    assert [line["event"] for line in lines(capsys)] == ["here"]


def test_exceptions_and_warnings_of_libraries_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    logs.configure("info", "json", "worker")
    logging.getLogger("some.library").warning("two\nlines %d", 2)
    warnings.showwarning(UserWarning("old"), UserWarning, "file.py", 7)
    try:
        raise ValueError("wrong\nvalue")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
        logs.show_exception(error, error.__traceback__)
    thread = threading.Thread(target=lambda: 1 / 0, name="helper")
    thread.start()
    thread.join()
    library, warning, uncaught, shown, in_thread = lines(capsys)
    assert (library["event"], library["logger"], library["level"]) == ("two\nlines 2", "some.library", "warning")
    assert (warning["event"], warning["category"], warning["at"]) == ("old", "UserWarning", "file.py:7")
    for line in (uncaught, shown):
        assert line["event"] == "ValueError: wrong\nvalue"
        assert "Traceback" in line["exception"]
    assert (in_thread["event"], in_thread["thread"]) == ("ZeroDivisionError: division by zero", "helper")


def test_a_log_that_the_script_sets_up_itself_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logs.configure("info", "json", "worker")
    logging.basicConfig(level=logging.ERROR, format="mine: %(message)s")
    logging.getLogger("some.library").error("wrong")
    assert capsys.readouterr().err == "mine: wrong\n"


def test_the_last_line_of_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "server")
    logs.complain("paramserver: error: no coordinator answers")
    logs.say("everything promised is there")
    assert [(line["level"], line["event"]) for line in lines(capsys)] == [
        ("error", "no coordinator answers"),
        ("info", "everything promised is there"),
    ]
    structlog.reset_defaults()
    logs.configure("info", "text", "server")
    logs.complain("paramserver: error: no coordinator answers")
    logs.say("everything promised is there")
    printed = capsys.readouterr()
    assert printed.err == "paramserver: error: no coordinator answers\n"
    assert printed.out == "everything promised is there\n"


@pytest.mark.parametrize(
    ("form", "container", "terminal", "json_lines"),
    [
        ("auto", True, False, True),
        ("auto", True, True, False),
        ("auto", False, False, False),
        ("json", False, True, True),
        ("text", True, False, False),
    ],
)
def test_auto_is_json_in_a_container_without_a_terminal(
    form: str,
    container: bool,
    terminal: bool,
    json_lines: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logs, "in_container", lambda: container)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logs.configure("info", form, "server")
    structlog.get_logger().info("here")
    assert capsys.readouterr().err.startswith("{") == json_lines


@pytest.mark.parametrize("launched", [False, True])
def test_people_see_the_step_and_the_name_unless_the_launcher_shows_it(
    launched: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", "text", "worker", launched)
    logs.known_as("worker-3", lambda: 812)
    structlog.get_logger().info("a message", left=2)
    printed = capsys.readouterr().err
    assert ("name=worker-3" in printed) == (not launched)
    assert "a message" in printed
    assert "step=812" in printed


def test_no_message_uses_a_key_that_every_line_has() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "log"
            ):
                wrong += [f"{path}:{node.lineno} {key.arg}" for key in node.keywords if key.arg in COMMON]
    assert wrong == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_behind_standard_error_does_not_end_the_process(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs._Process, "unwritten", None)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "write", full)
    structlog.reset_defaults()
    logs.configure("info", form, "coordinator")
    structlog.get_logger().warning("lost")
    logs.say("lost")
    logs.complain("lost")
