"""How a process ends: which signals end a command, and that a script ends as under plain Python."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.processes.ends import hand_on, handles, listen

ENDING = """
import atexit, gzip, sys, threading
from paramserver.processes.ends import end_as_python
kept = [open("text", "w"), gzip.open("packed", "wt"), open("bytes", "wb")]
for file in kept[:2]:
    file.write("all of it")
kept[2].write(b"all of it")
atexit.register(print, "exit function")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
"""


@pytest.fixture
def signals() -> Iterator[None]:
    """Puts the handlers of signals back."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("before", "wanted"), [(signal.SIG_IGN, []), (signal.SIG_DFL, [signal.SIGHUP])])
def test_a_hang_up_that_is_ignored_stays_ignored(before: signal.Handlers, wanted: list[int], signals: None) -> None:
    """As nohup wants it."""
    signal.signal(signal.SIGHUP, before)
    heard: list[int] = []

    async def main() -> None:
        listen(heard.append)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert heard == [*wanted, signal.SIGTERM]


def test_a_free_signal_is_handed_on_to_scripts_that_handle_it(signals: None) -> None:
    me, heard = os.getpid(), []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    assert handles(me, signal.SIGUSR1)
    assert hand_on({me: "worker-0"}, signal.SIGUSR1) == "SIGUSR1 was handed on to worker-0"
    assert heard == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # then it would end this process
    sentence = "SIGUSR1 has come, and no script has a handler for it: nothing changes"
    assert hand_on({me: "worker-0", 1 << 30: "worker-1"}, signal.SIGUSR1) == sentence


def ended(tmp_path: Path, last: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", ENDING + last]
    return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)


def test_threads_exit_functions_and_files_as_at_the_end_of_python(tmp_path: Path) -> None:
    done = ended(tmp_path, "end_as_python(7)")
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (7, ["thread", "exit function"], "")
    assert (tmp_path / "text").read_text() == (tmp_path / "bytes").read_text() == "all of it"
    with gzip.open(tmp_path / "packed", "rt") as packed:
        assert packed.read() == "all of it"


def test_an_end_within_the_end_of_python(tmp_path: Path) -> None:
    """As if a context failed to close each time."""
    done = ended(tmp_path, "threading._register_atexit(lambda: end_as_python(5))")
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (5, ["exit function"], "")
    assert (tmp_path / "text").read_text() == "all of it"


def test_files_of_another_process_are_left_alone(tmp_path: Path) -> None:
    assert ended(tmp_path, "end_as_python(7, kept)").returncode == 7
    assert (tmp_path / "text").read_text() == ""


def test_an_end_that_hangs_is_cut_off(tmp_path: Path) -> None:
    done = ended(
        tmp_path, "threading.Thread(target=threading.Event().wait, name='hangs').start(); end_as_python(3, (), 0.2)"
    )
    assert done.returncode == 3
    assert "the script ended 0.2 s ago, and its threads hangs still run" in done.stderr
