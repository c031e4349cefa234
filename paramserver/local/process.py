"""Child processes of the launcher: each in a process group of its own, its output read line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LINE_LIMIT = 1 << 20


class Guard:
    """The small process that ends all groups if the launcher is killed (see guard.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def tell(self, word: str, what: object = "") -> None:
        """Send one line."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"{word} {what}\n" if what != "" else f"{word}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """There is nothing left to end."""
        self.tell("done")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(5.0)


class Child:
    """One process. ``on_line(name, text)`` gets its output."""

    def __init__(self, name: str, guard: Guard, on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self._guard = guard
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self.exited: asyncio.Task[int] | None = None

    async def start(self, argv: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        """Start it. Must be called in the launcher's main thread, with which the child dies."""
        self._process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            limit=_LINE_LIMIT,
        )
        self._guard.tell("group", self._process.pid)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            self._pumps.append(asyncio.create_task(self._pump(stream)))
        self.exited = asyncio.create_task(self._wait())

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the limit: shown in part
                line = await stream.read(_LINE_LIMIT)
            if not line:
                return
            self._on_line(self.name, line.decode(errors="replace").rstrip("\r\n"))

    async def _wait(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        # What it started itself (data loaders) must not outlive it, nor hold its output open.
        self._signal_group(signal.SIGKILL)
        self._guard.tell("forget", self._process.pid)
        await asyncio.wait(self._pumps, timeout=2.0)
        return code

    @property
    def pid(self) -> int:
        """Its process number, 0 before it starts."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """True between start and exit."""
        return self._process is not None and self._process.returncode is None

    def terminate(self) -> None:
        """Ask the process to end. What it has started itself, such as data loaders, ends with it, not before it."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group."""
        if self.running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def stop_all(children: Sequence[Child], patience_s: float) -> None:
    """Ask all to end, kill those that have not after ``patience_s``."""
    for child in children:
        child.terminate()
    waiting = [child.exited for child in children if child.exited is not None and not child.exited.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=patience_s)
    for child in children:
        child.kill()
    waiting = [task for task in waiting if not task.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=5.0)
