"""What a process writes is passed on whole, whatever it writes and however it ends."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
import time
from functools import partial
from typing import Any

import pytest

from paramserver import logs
from paramserver.cli.common import guard
from paramserver.launcher.display import PlainDisplay
from paramserver.processes.lines import Lines, NamedLines
from paramserver.processes.process import Child


class _Guard:
    """Nobody kills the launcher here."""

    def tell(self, word: str, what: object = "") -> None: ...


def output_of(program: str) -> tuple[int, list[str]]:
    """Exit code and lines of a Python program."""
    lines: list[str] = []

    async def go() -> int:
        guard: Any = _Guard()
        child = Child("worker-0", guard, lambda name: NamedLines(name, lambda *line: lines.append("|".join(line))))
        await child.start([sys.executable, "-I", "-S", "-c", program], os.environ)
        assert child.exited is not None
        async with asyncio.timeout(30.0):
            return await child.exited

    return asyncio.run(go()), lines


def test_a_line_of_five_megabytes() -> None:
    """Issue 14, item 16."""
    code, lines = output_of("print('x' * 5_000_000); print('after')")
    assert code == 0
    assert [len(line) for line in lines] == [len("worker-0|") + 5_000_000, len("worker-0|after")]


def test_many_lines_on_both_streams_in_order() -> None:
    program = (
        "import sys\n"
        "for i in range(50_000):\n    print('out', i); print('err', i, file=sys.stderr)\n"
        "sys.stdout.write('no end of line')\n"
    )
    _, lines = output_of(program)
    assert [line for line in lines if "|err" in line] == [f"worker-0|err {i}" for i in range(50_000)]
    out = [line for line in lines if "|err" not in line]
    assert out == [*(f"worker-0|out {i}" for i in range(50_000)), "worker-0|no end of line"]


def test_what_a_process_says_before_it_is_killed() -> None:
    code, lines = output_of(
        "import os, sys\nsys.stdout.write('y' * 60_000); sys.stdout.flush()\n"
        "os.write(2, b'\\xff\\n'); os.kill(os.getpid(), 9)"
    )
    assert code == -9
    assert sorted(lines) == ["worker-0|\\xff", "worker-0|" + "y" * 60_000]


def test_a_line_over_the_limit_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.processes.lines.Lines", partial(Lines, 4))
    _, lines = output_of("print('abcdefgh')")
    assert lines == ["worker-0|abcd", "worker-0 (the same line goes on)|efgh"]


def test_a_child_that_outlives_the_process_does_not_hold_up_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that has left the group keeps the output open."""
    monkeypatch.setattr("paramserver.processes.process._QUIET_S", 0.3)
    begun = time.monotonic()
    code, lines = output_of(
        "import os, time\nprint('first', flush=True)\nready, tell = os.pipe()\n"
        "if os.fork() == 0:\n    os.setsid(); os.write(tell, b'x'); time.sleep(6); os._exit(0)\n"
        "os.read(ready, 1)\nos.write(1, b'last')"
    )
    assert (code, lines) == (0, ["worker-0|first", "worker-0|last"])
    assert 0.3 <= time.monotonic() - begun < 5.0, "its output was still open, and nobody waited for that"


def test_characters_that_standard_output_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    PlainDisplay(1.0).line("worker-0", "für")
    assert raw.getvalue() == b"worker-0 | f\\xfcr\n"


def test_a_full_disk_behind_standard_output_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once, and does not end with code 0."""
    monkeypatch.setattr(logs._Process, "unwritten", None)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.stdout, "write", full)
    display = PlainDisplay(1.0)
    display.line("worker-0", "first")
    display.line("worker-0", "second")
    warning = "paramserver: warning: the output cannot be written, and the job goes on: No space left on device\n"
    assert capsys.readouterr().err == warning
    monkeypatch.undo()
    logs.miss(BrokenPipeError())
    assert guard(lambda: 0) == 1, "the reader does not have everything"
    logs._Process.unwritten = None
