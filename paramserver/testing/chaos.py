"""``paramserver chaos``: a run under planned faults, and before it the same run without them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_OWN_FILES = (_SUMMARY, "--report", "--save", "--checkpoint-dir")


@dataclass(frozen=True, slots=True)
class Options:
    """``plan`` is called with the shape of the cluster, None without a twin. ``report``: a file for it, as JSON."""

    plan: Callable[[Shape | None], Plan]
    twin: bool = True
    allow_unfired: bool = False
    report: Path | None = None


def chaos(command: Sequence[str], options: Options, say: Callable[[str], None]) -> int:
    """Run ``command`` (the arguments of paramserver, beginning with "run") under faults; returns the exit code.

    0 if the run ended well, all faults struck and the result equals that of the run without faults; else the exit code
    of the run, or 1. Raises ConfigError for commands that it cannot run, ParamServerError if the twin fails.
    """
    check_command(command)
    with tempfile.TemporaryDirectory(prefix="paramserver-chaos-", ignore_cleanup_errors=True) as directory:
        return _run(_Words.of(command), options, say, Path(directory))


def check_command(command: Sequence[str]) -> None:
    """Raises ConfigError unless the command is a run that begins anew."""
    if list(command[:1]) != ["run"]:
        raise errors.ConfigError(
            'the command to run comes after "--", as in: paramserver chaos --seed 7 --faults 20 -- run train.py'
        )
    if any(word.partition("=")[0] == "--resume" for word in _Words.of(command).others):
        raise errors.ConfigError(
            "a run under faults begins anew, since it is compared with another run: leave out --resume"
        )


@dataclass(frozen=True, slots=True)
class _Words:
    """A command. ``files``: by option, the files that belong to one run; ``script``: the words from "--" on."""

    files: Mapping[str, str]
    others: Sequence[str]
    script: Sequence[str]

    @classmethod
    def of(cls, command: Sequence[str]) -> _Words:
        """Raises ConfigError if an option lacks its file."""
        cut = list(command).index("--") if "--" in command else len(command)
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for option in _OWN_FILES:
            parser.add_argument(option, dest=option)
        try:
            named, others = parser.parse_known_args(list(command[:cut]))
        except argparse.ArgumentError as error:
            raise errors.ConfigError(str(error)) from error
        return cls({option: file for option, file in vars(named).items() if file is not None}, others, command[cut:])

    def with_files(self, files: Mapping[str, str]) -> list[str]:
        """The words of the command with these files in place of its own."""
        return [*self.others, *(word for option in files.items() for word in option), *self.script]


def _run(words: _Words, options: Options, say: Callable[[str], None], directory: Path) -> int:
    twin = None
    if options.twin:
        say("chaos: first the same run without faults")
        twin = _twin(words, directory)
    plan = options.plan(_shape(twin) if twin is not None else None)
    path = directory / "plan.toml"
    path.write_text(plan.to_toml())
    say(f"chaos: {len(plan.faults)} faults are planned (seed {plan.seed})")
    files = {_SUMMARY: str(directory / "summary.json"), **words.files}
    summary = Path(files[_SUMMARY])
    summary.unlink(missing_ok=True)
    begun = time.time()
    code = _paramserver(words.with_files(files), environment(path))
    report = Report(plan, FiredLog.beside(path).read(), begun, code, _read(summary), twin)
    for line in ["", *report.lines(options.allow_unfired)]:
        say(line)
    if options.report is not None:
        _write(options.report, report.as_json(options.allow_unfired))
    return (code or 1) if report.problems(options.allow_unfired) else 0


def _twin(words: _Words, directory: Path) -> dict[str, Any]:
    """The summary of the same run without faults, with files of its own."""
    files = {_SUMMARY: str(directory / "twin--summary")}
    files |= {option: str(directory / f"twin{option}{Path(file).suffix}") for option, file in words.files.items()}
    log = directory / "twin.log"
    with log.open("wb") as output:
        code = _paramserver(words.with_files(files), {}, output)
    found = _read(Path(files[_SUMMARY]))
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
