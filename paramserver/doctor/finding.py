"""Findings of `paramserver doctor`, and how its checks run: with a deadline, and never ending in a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paramserver.errors import ParamServerError

T = TypeVar("T")

DEADLINE_S = 15.0
_MAX_CHARS = 500


class Level(enum.StrEnum):
    """The severity of a finding. Warnings and failures make the exit code 1, notes do not."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"

    @property
    def well(self) -> bool:
        """Whether no action is needed."""
        return self in (Level.OK, Level.NOTE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `value` may have further lines, a small table; `remedy` is empty if all is well."""

    check: str
    level: Level
    value: str
    remedy: str = ""


Findings = Finding | Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name. ``look`` is called in a thread of its own, unless it is a coroutine function."""

    name: str
    look: Callable[[], Findings | Awaitable[Findings]]
    deadline_s: float = DEADLINE_S


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in order; the checks run at the same time. Blocking."""

    async def run() -> list[list[Finding]]:
        return list(await asyncio.gather(*(_run(check) for check in checks)))

    return [finding for findings in asyncio.run(run()) for finding in findings]


async def _run(check: Check) -> list[Finding]:
    try:
        async with asyncio.timeout(check.deadline_s):
            look: Any = check.look
            findings = await (look() if inspect.iscoroutinefunction(look) else in_thread(look, f"doctor {check.name}"))
    except TimeoutError:
        value = f"no result within {check.deadline_s:g} s"
        return [
            Finding(
                check.name,
                Level.FAIL,
                value,
                "find the part of the machine that hangs: a file system, a name server, a device",
            )
        ]
    except Exception as error:
        return [Finding(check.name, Level.FAIL, f"the check broke off: {reason(error)}", "mend that, then ask again")]
    return [findings] if isinstance(findings, Finding) else list(findings)


def in_thread(call: Callable[[], T], name: str = "doctor") -> asyncio.Future[T]:
    """The result of a blocking call. Its thread is a daemon: a call that hangs does not hold up the process's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not future.done():
            settled()

    def work() -> None:
        try:
            result = call()
        except Exception as error:
            settled = partial(future.set_exception, error)
        else:
            settled = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # too late: the loop is closed
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def reason(error: BaseException) -> str:
    """The reason of a failure, in one line. Texts of other packages are not shown: they may quote a password."""
    if isinstance(error, ParamServerError):
        return clean(str(error))
    if isinstance(error, OSError) and error.strerror:
        return clean(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


def sentence(check: str, level: Level, text: str, otherwise: str = "") -> Finding:
    """A finding from an error's text, which names the problem and then, after a semicolon or colon, the remedy."""
    cut = text.rfind("; ") if "; " in text else text.rfind(": ")
    if cut < 0:
        return Finding(check, level, clean(text), otherwise)
    return Finding(check, level, clean(text[:cut]), clean(text[cut + 2 :]))


def clean(text: str) -> str:
    """Text of another program made fit for a terminal: one printable line of limited length."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 2] + " …"


def listing(names: Sequence[str], most: int = 12) -> str:
    """Names with commas, the rest as a number."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return clean(", ".join(names[:most])) + rest


def is_writable_directory(path: Path) -> str:
    """The reason why no file can be made in the directory; empty if files can be made. The trial file is removed."""
    trial = path / f".paramserver-doctor-{os.getpid()}"
    try:
        os.close(os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        trial.unlink()
    except OSError as error:
        return reason(error)
    return ""
