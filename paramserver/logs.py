"""How the processes of a job write their log to standard error: lines for people, or one JSON object per line.

Each line says which process it is from, and at which step: both are told once for the process (:func:`known_as`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import structlog

from paramserver.core import shown

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_Line = MutableMapping[str, Any]


class _Process:
    """The facts about this process that stand in each of its lines. A name may have been given by a launcher."""

    role = name = ""
    launched = configured = False
    step: Callable[[], int | None] | None = None
    json = False
    # A line of `say` is lost.
    unwritten: OSError | None = None


def configure(level: str, form: str = "text", role: str = "", launched: bool = False) -> None:
    """Set the log up for this process; does nothing if the program has done so itself.

    ``form``: "text", "json", or "auto": JSON in a container where standard error is no terminal. ``role``: of this
    process. ``launched``: `paramserver run` shows the lines behind the name of the process.
    """
    if structlog.is_configured():
        return
    _Process.configured = True
    _Process.json = form == "json" or (form == "auto" and in_container() and not sys.stderr.isatty())
    _Process.role, _Process.launched = role, launched
    _Process.name, _Process.step = role if role == "coordinator" else "", None
    processors: list[Any] = [structlog.processors.add_log_level, structlog.processors.StackInfoRenderer()]
    if _Process.json:
        processors += [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _with_process,
            _harmless,
            structlog.processors.JSONRenderer(),
        ]
        _take_over_python()
    else:
        processors += [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            _with_name,
            _harmless,
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, exception_formatter=_traceback),
        ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Patient(sys.stderr))),
        cache_logger_on_first_use=False,
    )


def begin_anew() -> None:
    """In a forked process: let :func:`configure` set up a log of its own, if it has set up that of the parent."""
    if _Process.configured:
        structlog.reset_defaults()
        _Process.configured = False


class _Patient:
    """A stream for the log: a line that cannot be written, as on a full disk, is lost and harms nobody."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def known_as(name: str, step: Callable[[], int | None] | None = None) -> None:
    """This process is the member of that name ("worker-1"). ``step``: its version, asked from any thread."""
    _Process.name, _Process.step = name, step


def in_container() -> bool:
    """Whether this process runs in a container."""
    marks = ("/.dockerenv", "/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(Path(mark).exists() for mark in marks)


def say(line: str) -> None:
    """A line of a role for people: on standard output, or in the log where that is JSON.

    A line that cannot be written does not end the role now: see :func:`unwritten`.
    """
    if _Process.json:
        _in_log(line)
        return
    try:
        print(shown.lines(line), flush=True)
    except OSError as error:
        miss(error)


def miss(error: OSError) -> None:
    """A line on standard output is lost, and its process goes on; the first time it says so on standard error."""
    if _Process.unwritten is None:
        complain(f"paramserver: warning: the output cannot be written, and the job goes on: {error.strerror}")
    _Process.unwritten = error


def unwritten() -> OSError | None:
    """Why lines on standard output are lost, if there are any: a command with such lines does not end with code 0."""
    return _Process.unwritten


def complain(line: str) -> None:
    """The line with which a process ends, on standard error."""
    if _Process.json:
        _in_log(line)
    else:
        with contextlib.suppress(OSError):  # the exit code says the rest
            print(shown.indented(line), file=sys.stderr, flush=True)


def _in_log(line: str) -> None:
    text = line.removeprefix("paramserver: ")
    logger = structlog.get_logger("paramserver")
    if text.startswith("error: "):
        logger.error(text.removeprefix("error: "))
    else:
        logger.info(text)


def show_exception(error: BaseException, trace: TracebackType | None) -> None:
    """The exception with which a process ends, as Python shows it, or as one line of JSON."""
    if _Process.json:
        _log_exception(type(error), error, trace)
    else:
        told = "".join(traceback.format_exception(type(error), error, trace))
        print(shown.lines(told), end="", file=sys.stderr, flush=True)


# ---- the facts of the process


def _step() -> int | None:
    if _Process.step is not None:
        with contextlib.suppress(Exception):  # the process may be changing what it is asked for; its log goes on
            return _Process.step()
    return None


def _with_process(logger: object, method: str, line: _Line) -> _Line:
    step = _step()
    own = {"role": _Process.role or _Process.name.partition("-")[0], "name": _Process.name}
    common = {"timestamp": line.pop("timestamp", None), "level": line.pop("level", method), **own, "step": step}
    return {key: value for key, value in common.items() if value not in (None, "")} | {
        key if key not in common else f"{key}_": value for key, value in line.items()
    }


def _with_name(logger: object, method: str, line: _Line) -> _Line:
    if _Process.name and not _Process.launched:
        line.setdefault("name", _Process.name)
    if (step := _step()) is not None:
        line.setdefault("step", step)
    return line


def _harmless(logger: object, method: str, line: _Line) -> _Line:
    """Texts of other processes steer no terminal, and look like no other line. JSON keeps the ends of lines."""
    clean = shown.lines if _Process.json else shown.one_line
    return {clean(key): clean(value) if isinstance(value, str) else value for key, value in line.items()}


def _traceback(stream: TextIO, told: Any) -> None:
    """A traceback in the text of a log, each line behind spaces."""
    written = io.StringIO()
    structlog.dev.plain_traceback(written, told)
    stream.write("    " + shown.indented(written.getvalue()))


# ---- JSON: what Python and libraries print


class _Lines(logging.Handler):
    """Messages of libraries, one line of JSON each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        level = "warning" if record.levelno < logging.ERROR else "error"
        logger = structlog.get_logger("paramserver")
        getattr(logger, level)(record.getMessage(), logger=record.name, exc_info=record.exc_info or None)


def _take_over_python() -> None:
    """Warnings, uncaught exceptions, and messages of libraries for which the script has set no log up."""
    logging.lastResort = _Lines(logging.WARNING)
    warnings.showwarning = _show_warning
    sys.excepthook = _log_exception
    threading.excepthook = _log_thread


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    structlog.get_logger("paramserver").warning(str(message), category=category.__name__, at=f"{filename}:{lineno}")


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    structlog.get_logger("paramserver").error(f"{kind.__name__}: {error}", exc_info=(kind, error, trace))


def _log_thread(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value
    if error is not None and not isinstance(error, SystemExit):
        thread = args.thread.name if args.thread is not None else ""
        structlog.get_logger("paramserver").error(
            f"{args.exc_type.__name__}: {error}", thread=thread, exc_info=(args.exc_type, error, args.exc_traceback)
        )
