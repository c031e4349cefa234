"""How processes end: the signals to a command that starts processes, and the end of a script as Python makes it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals whose meaning a script chooses.
_FREE = (signal.SIGUSR1, signal.SIGUSR2)
# So long the threads, exit functions and files of a script may take after its end, in seconds.
END_S = 30.0
# Exit codes with which this process is about to end.
_ending: list[int] = []
# Files that hold nothing back themselves once they are flushed.
_PLAIN = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.BytesIO)


def listen(end: Callable[[signal.Signals], None], hand_on: Callable[[signal.Signals], None] | None = None) -> None:
    """Call ``end`` with each signal that asks this process to end, and ``hand_on`` with SIGUSR1 and SIGUSR2.

    Needs a running event loop in the main thread. A SIGHUP that is ignored (nohup) stays ignored.
    """
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    if hand_on is not None:
        for number in _FREE:
            loop.add_signal_handler(number, hand_on, number)


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal, which would otherwise end the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def hand_on(names: dict[int, str], number: signal.Signals) -> str:
    """Send a signal to the processes (name by pid) that have a handler for it; a line for people."""
    taken = [pid for pid in names if handles(pid, number)]
    for pid in taken:
        os.kill(pid, number)
    if not taken:
        return f"{number.name} has come, and no script has a handler for it: nothing changes"
    return f"{number.name} was handed on to {', '.join(names[pid] for pid in taken)}"


def end_as_python(code: int, apart: Collection[object] = (), limit_s: float = END_S) -> NoReturn:
    """End this process with this exit code after what Python does at the end of a script.

    Python waits for threads, calls the functions of `atexit`, and writes what open files hold back. This process ends
    with ``code`` afterwards, whatever threads of libraries do meanwhile, and after ``limit_s`` seconds in every case.
    ``apart``: files that are not this process's own.
    """
    limit = threading.Timer(limit_s, _cut, (code, limit_s))
    limit.daemon = True
    limit.start()
    waits: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]
    steps: list[Callable[[], None]] = [waits, atexit._run_exitfuncs, partial(_write_files, apart)]
    if _ending:  # what Python calls meanwhile has come to this function once more
        del steps[0]
    _ending.append(code)
    for step in steps:
        try:
            step()
        except BaseException:
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _cut(code: int, limit_s: float) -> None:
    names = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    what = f"its threads {', '.join(names)} still run" if names else "its exit functions still run"
    text = f"paramserver: the script ended {limit_s:g} s ago, and {what}: the process is ended without them\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)


def _write_files(apart: Collection[object]) -> None:
    """Write what open files hold back: text first, then what compresses, then bytes."""
    gc.collect()
    left = {id(one) for one in apart}
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}  # asks no object anything
    files: list[Any] = [one for one in objects if type(one) in kinds and id(one) not in left]
    for file in files:
        if isinstance(file, io.TextIOBase):
            _quietly(file.flush)
    for file in files:  # a compressed file ends with bytes of its own
        if isinstance(file, io.BufferedIOBase) and not isinstance(file, _PLAIN):
            _quietly(file.close)
    for file in files:
        if isinstance(file, io.BufferedWriter | io.BufferedRandom):
            _quietly(file.flush)


def _quietly(write: Callable[[], object]) -> None:
    """As Python at its end: a file that cannot be written any more is nobody's error."""
    with contextlib.suppress(Exception):
        write()
