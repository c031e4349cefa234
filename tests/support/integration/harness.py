"""Real processes with deadlines: start commands, read what they say, find all they started, leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import fetch_status
from paramserver.transport.security.access import Security
from paramserver.transport.security.tokens import Tokens

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
DIGITS = ROOT / "workers" / "digits.py"
# How long a run may take on a busy machine before it counts as hanging.
RUN_S = 110.0
# After this nothing of an interrupted or killed run may be left; half of it on a machine that does nothing else.
GONE_S = 10.0
_MARK = "PST_MARK"

T = TypeVar("T")


def until(what: str, found: Callable[[], T], deadline_s: float) -> T:
    """Ask again and again until the answer counts as true; fails with `what` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (answer := found()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)
    return answer


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    def check(self, code: int = 0) -> Done:
        """Itself, if the exit code is this one."""
        assert self.code == code, f"exit code {self.code}, not {code}\n{self.text}"
        return self

    @property
    def text(self) -> str:
        """All output, for messages."""
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def said(self) -> str:
        """Standard output and standard error together."""
        return self.out + self.err


class Running:
    """A command that runs, in a session of its own; its output is read all the time."""

    def __init__(self, argv: list[str], environ: dict[str, str], cwd: Path) -> None:
        self._begun = time.monotonic()
        # What commands show to a coordinator at an address.
        self.security: Callable[[str], Security | None] = lambda address: None
        self._process = subprocess.Popen(
            argv,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._texts: dict[str, list[str]] = {"out": [], "err": []}
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self._texts["out"]), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, self._texts["err"]), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines.append(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        """Standard output so far."""
        return "".join(list(self._texts["out"]))

    @property
    def err(self) -> str:
        """Standard error so far."""
        return "".join(list(self._texts["err"]))

    def wait_for(self, pattern: str, deadline_s: float = RUN_S, count: int = 1) -> None:
        """Until standard output has had `count` matches of `pattern`; fails at once if the command ends without."""

        def found() -> bool:
            if len(re.findall(pattern, self.out)) >= count:
                return True
            if self._process.poll() is not None:
                done = self.wait(10.0)
                assert len(re.findall(pattern, done.out)) >= count, f"never said {pattern!r}\n{done.text}"
            return False

        try:
            until(f"{count} × {pattern!r} in the output", found, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- stdout\n{self.out}\n--- stderr\n{self.err}") from None

    def wait_for_err(self, text: str, deadline_s: float = RUN_S) -> None:
        """Until standard error holds `text`; fails if the command ends without."""
        try:
            until("it says so, or ends", lambda: text in self.err or self.ended, deadline_s)
            until("it says so", lambda: text in self.err, 5.0)  # its last words may still be on their way
        except AssertionError:
            code = self._process.poll()
            raise AssertionError(f"never said {text!r}; exit code {code}\n{self.out}\n{self.err}") from None

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, to none of its children."""
        self._process.send_signal(number)

    def wait(self, deadline_s: float = RUN_S) -> Done:
        """Until it has ended."""
        try:
            code = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still runs after {deadline_s:g} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
            ) from None
        for reader in self._readers:
            reader.join(10.0)
        return Done(code, self.out, self.err, time.monotonic() - self._begun)

    def kill(self) -> None:
        """End it if it has not; the descriptors are closed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(10.0)
        for reader in self._readers:
            reader.join(10.0)


class Place:
    """Where one or more runs happen: their temporary files, their job files, their output.

    All processes started from here, and theirs, carry a mark in their environment, so that they are found whoever
    their parent is by then.
    """

    def __init__(self, temporary: str = "t") -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pst-"))
        self.temporary = self.root / temporary
        self.temporary.mkdir(parents=True)
        self.work = self.root / "work"
        self.work.mkdir()
        # In /dev/shm, since the path must be short.
        self._meeting = Path(tempfile.mkdtemp(prefix="pst-", dir="/dev/shm"))
        self._meeting_made_ns = self._meeting.stat().st_mtime_ns
        self._mark = secrets.token_hex(8)
        self._running: list[Running] = []

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def environ(self) -> dict[str, str]:
        """The environment of the commands: ours, without settings of paramserver."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSERVER_")}
        for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "PYTHONDONTWRITEBYTECODE", "NO_COLOR", "FORCE_COLOR"):
            kept.pop(name, None)
        places = {"TMPDIR": str(self.temporary), "XDG_STATE_HOME": str(self.work / "state")}
        places["PARAMSERVER_LOG__FORMAT"] = "text"  # also where the tests run in a container
        return {**kept, **places, _MARK: self._mark, "PYTHONPATH": str(ROOT)}

    @property
    def runtime(self) -> Path:
        """The directory with the files of running jobs."""
        return self.work / "state" / "paramserver" / f".runtime-{os.uname().nodename}"

    def security(self, address: str) -> Security:
        """What the commands of this place show to a coordinator at this address."""
        return Security(join=Tokens(path=self.runtime / f"localhost-{address.rpartition(':')[2]}.token", awaited=True))

    def reader(self) -> dict[str, str]:
        """The header with which the only run of this place lets its page be read."""
        (path,) = self.runtime.glob("*.token")
        return {"authorization": f"Bearer {path.read_text().strip()}"}

    def page(self) -> str:
        """A link that opens the page of the only run of this place, once."""
        return self.paramserver("dashboard").check().out.strip()

    @property
    def meeting_apart(self) -> dict[str, str]:
        """Variables for commands whose processes meet where no other run of this machine leaves anything."""
        return {"PARAMSERVER_CLUSTER__MEETING_DIR": str(self._meeting)}

    def check_meetings(self) -> None:
        """Commands with `meeting_apart` have met, and left nothing where they met."""
        assert self._meeting.stat().st_mtime_ns > self._meeting_made_ns, "nobody has met"
        assert list(self._meeting.iterdir()) == []

    def start(self, *argv: str | Path, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> Running:
        """Start a command, with these variables on top of those of `environ()`."""
        running = Running([str(word) for word in argv], {**self.environ(), **(environ or {})}, cwd or self.work)
        running.security = self.security
        self._running.append(running)
        return running

    def python(self, *argv: str | Path, environ: Mapping[str, str] | None = None) -> Done:
        """Run a script alone."""
        return self.start(sys.executable, *argv, environ=environ).wait()

    def launch(self, *tokens: str | Path, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> Running:
        """Start a command of paramserver."""
        return self.start(sys.executable, "-m", "paramserver", *tokens, cwd=cwd, environ=environ)

    def paramserver(
        self, *tokens: str | Path, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> Done:
        """Run a command of paramserver to its end."""
        return self.launch(*tokens, cwd=cwd, environ=environ).wait()

    def status(self, *tokens: str) -> dict[str, Any]:
        """What `paramserver status --json` says."""
        facts = json.loads(self.paramserver("status", "--json", *tokens).check().out)
        assert isinstance(facts, dict)
        return facts

    def processes(self) -> dict[int, str]:
        """All living processes that descend from commands of this place: pid to command line.

        The store overwrites its environment, where the mark is; but it works in a directory of this place.
        """
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    marked = f"{_MARK}={self._mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    if marked or Path(os.readlink(entry / "cwd")).is_relative_to(self.root):
                        words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                        found[int(entry.name)] = b" ".join(words).decode(errors="replace")
        return found

    def wait_until_gone(self, since: float, within_s: float = GONE_S) -> float:
        """Until no process of this place lives, at most `within_s` after `since` (monotonic); returns the seconds."""
        while left := self.processes():
            waited = time.monotonic() - since
            assert waited < within_s, f"still there after {waited:.1f} s: {left}"
            time.sleep(0.02)
        return time.monotonic() - since

    def leftovers(self) -> list[str]:
        """What lies in the temporary directory, and among the files of running jobs.

        Torch's own is no matter. A coordinator that was started by hand leaves its token, for its successor.
        """
        names = [str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*")]
        stays = {path.name for path in self.runtime.glob("*token") if not path.is_symlink()}
        names += [path.name for path in self.runtime.glob("*") if path.name not in stays]
        return [name for name in names if not name.startswith("torchinductor_")]

    def close(self) -> None:
        """Kill what is left and remove all files."""
        for running in self._running:
            running.kill()
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self._meeting, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)


def status_of(run: Running) -> dict[str, Any]:
    """The facts of `paramserver status --json` about a `paramserver run`, without a process that asks for them."""
    found = re.search(r"coordinator at ([0-9.]+:[0-9]+)", run.out)
    assert found is not None, run.out
    return describe(fetch_status(found[1], security=run.security(found[1])))


def free_address() -> str:
    """An address of this machine at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def place_fixture() -> Iterator[Place]:
    """The body of a fixture that gives a place."""
    with Place() as place:
        yield place


def read_summary(path: Path) -> dict[str, Any]:
    """A summary file."""
    summary = json.loads(path.read_text())
    assert isinstance(summary, dict)
    return summary


def complaint(done: Done, code: int) -> str:
    """The one sentence with which a command ended with this code: no traceback, not said twice."""
    done.check(code)
    assert "Traceback" not in done.said, done.text
    lines = [line for line in done.said.splitlines() if "paramserver: error: " in line]
    assert len(lines) == 1, done.text
    return lines[0].partition("paramserver: error: ")[2]
