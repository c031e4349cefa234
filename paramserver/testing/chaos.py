"""``paramserver chaos``: a run under planned faults, and before it the same run without them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paramserver import errors
from paramserver.processes.children import dying_with_me
from paramserver.testing.arming import ENV_FLAG, ENV_PLAN, environment
from paramserver.testing.fired import FiredLog
from paramserver.testing.plan import Plan
from paramserver.testing.report import Report
from paramserver.testing.seeded import Shape

_STOP_S = 10.0
_SUMMARY = "--summary"
# Files that belong to one run alone: the run without faults gets its own.
_OWN_FILES = (_SUMMARY, "--save", "--checkpoint-dir")


@dataclass(frozen=True, slots=True)
class Options:
    """``plan`` is called with the shape of the cluster, None without a twin. ``report``: a file for it, as JSON."""

    plan: Callable[[Shape | None], Plan]
    twin: bool = True
    allow_unfired: bool = False
    report: Path | None = None


def chaos(command: Sequence[str], options: Options, say: Callable[[str], None]) -> int:
    """Run ``command`` (the arguments of paramserver, beginning with "run") under faults; returns the exit code.

    0 if the run ended well, all faults struck and the result is that of the run without faults; else the exit code of
    the run, or 1. Raises ConfigError for commands that it cannot run, ParamServerError if the twin fails.
    """
    check_command(command)
    directory = Path(tempfile.mkdtemp(prefix="paramserver-chaos-"))
    try:
        return _Chaos(list(command), options, say, directory).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_command(command: Sequence[str]) -> None:
    """Raises ConfigError unless it is a run that begins anew."""
    if list(command[:1]) != ["run"]:
        raise errors.ConfigError(
            'what is to run stands after "--", as in: paramserver chaos --seed 7 --faults 20 -- run train.py'
        )
    own, _ = _split(command)
    if any(word.partition("=")[0] == "--resume" for word in own):
        raise errors.ConfigError("a run under faults begins anew, since it is compared with another one: no --resume")


class _Chaos:
    def __init__(self, command: list[str], options: Options, say: Callable[[str], None], directory: Path) -> None:
        self._command = command
        self._options = options
        self._say = say
        self._directory = directory

    def run(self) -> int:
        options = self._options
        twin = self._twin() if options.twin else None
        plan = options.plan(_shape(twin) if twin is not None else None)
        path = self._directory / "plan.toml"
        path.write_text(plan.to_toml())
        self._say(f"chaos: {len(plan.faults)} faults are planned (seed {plan.seed})")
        command = list(self._command)
        summary = _value(command, _SUMMARY)
        if summary is None:
            summary = str(self._directory / "summary.json")
            command = _with(command, _SUMMARY, summary)
        Path(summary).unlink(missing_ok=True)
        begun = time.time()
        code = _paramserver(command, environment(path))
        report = Report(plan, FiredLog.beside(path).read(), begun, code, _read(Path(summary)), twin)
        for line in ["", *report.lines(options.allow_unfired)]:
            self._say(line)
        if options.report is not None:
            _write(options.report, report.as_json(options.allow_unfired))
        if not report.problems(options.allow_unfired):
            return 0
        return code or 1

    def _twin(self) -> dict[str, Any]:
        """The summary of the same run without faults."""
        self._say("chaos: first the same run without faults")
        summary, log = self._directory / "twin.json", self._directory / "twin.log"
        command = list(self._command)
        for option in _OWN_FILES:
            if _value(command, option) is not None:
                command = _without(command, option)
                if option != _SUMMARY:
                    command = _with(command, option, str(self._directory / f"twin{option}"))
        command = _with(command, _SUMMARY, str(summary))
        with log.open("wb") as output:
            code = _paramserver(command, {}, output)
        found = _read(summary)
        if code or found is None:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise _TwinFailed(f"the run without faults ended with exit code {code}; its last words:\n{last}", code or 1)
        return found


class _TwinFailed(errors.ParamServerError):
    """The run without faults has failed; the command ends with the exit code of that run."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code if code > 0 else 1


def _paramserver(command: Sequence[str], variables: dict[str, str], output: Any = None) -> int:
    """Run a command of paramserver; signals for us are passed on to it."""
    environ = {name: value for name, value in os.environ.items() if name not in (ENV_PLAN, ENV_FLAG)}
    process = subprocess.Popen(
        dying_with_me([sys.executable, "-m", "paramserver", *command]),
        env={**environ, **variables},
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
    )
    with _passing_on(process):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the process in an orderly way; we end when it has."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# ---- the words of a command


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for paramserver, and the words from "--" on."""
    cut = list(command).index("--") if "--" in command else len(command)
    return list(command[:cut]), list(command[cut:])


def _value(command: Sequence[str], option: str) -> str | None:
    """The value of an option, given as "--x value" or "--x=value"; None if it is not given."""
    own, _ = _split(command)
    for number, word in enumerate(own):
        if word == option and number + 1 < len(own):
            return own[number + 1]
        if word.startswith(option + "="):
            return word.partition("=")[2]
    return None


def _without(command: Sequence[str], option: str) -> list[str]:
    own, rest = _split(command)
    kept: list[str] = []
    skip = False
    for word in own:
        if not skip and not word.startswith(option + "=") and word != option:
            kept.append(word)
        skip = not skip and word == option
    return [*kept, *rest]


def _with(command: Sequence[str], option: str, value: str) -> list[str]:
    own, rest = _split(command)
    return [*own, option, value, *rest]


# ---- files


def _shape(summary: dict[str, Any]) -> Shape:
    asynchronous = summary["mode"] == "async"
    steps = summary["contributions_applied"] if asynchronous else summary["steps"]
    return Shape(summary["servers"], summary["workers"], max(1, steps), summary["mode"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, facts: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise errors.UserError(f"the report cannot be written to {path}: {error.strerror or error}") from error
