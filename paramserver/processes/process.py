"""Child processes of a launcher: each in a process group of its own, its output read line by line or passed through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paramserver.processes.lines import Output
from paramserver.processes.starting import Command, Executing, Started, Starter

_READ_BYTES = 64 << 10
# The pipes of an ended process are read to the end, as long as something comes within so many seconds.
_QUIET_S = 2.0


class Guard:
    """The small process that ends all process groups if the launcher is killed (see guard.py)."""

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
        """End the guard: the launcher has ended all processes itself."""
        self.tell("done")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(5.0)


class Child:
    """One process. ``output(name)`` takes one of its two streams; None: the process writes where this one writes."""

    def __init__(
        self, name: str, guard: Guard, output: Callable[[str], Output] | None, starter: Starter | None = None
    ) -> None:
        self.name = name
        self._guard = guard
        self._output = output
        self._starter = starter or Executing()
        self._process: Started | None = None
        self._pumps: list[asyncio.Task[None]] = []
        # How many pieces of output have come.
        self._heard = 0
        self.exited: asyncio.Task[int] | None = None

    async def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        light: bool = False,
        stdin: int | None = None,
    ) -> None:
        """Start it. Must be called in the launcher's main thread, with which the child dies.

        ``light``: the program imports little. ``stdin``: a descriptor (`Command`).
        """
        # asyncio would also wait for the end of pipes of its own before it says that the process has ended.
        outputs = [os.pipe() for _ in range(2)] if self._output is not None else []
        out, err = (outputs[0][1], outputs[1][1]) if outputs else (None, None)
        try:
            self._process = await self._starter.start(Command(argv, environment, out, err, pass_fds, light, stdin))
        except BaseException:
            for ours, _ in outputs:
                os.close(ours)
            raise
        finally:
            for _, its in outputs:
                os.close(its)
        self._guard.tell("group", self._process.pid)
        self._pumps = [asyncio.create_task(self._pump(ours)) for ours, _ in outputs]
        self.exited = asyncio.create_task(self._wait())

    async def _pump(self, pipe: int) -> None:
        assert self._output is not None
        output, stream = self._output(self.name), asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0)
        )
        try:
            while data := await stream.read(_READ_BYTES):
                self._heard += 1
                output.feed(data)
        finally:
            output.end()
            transport.close()

    async def _wait(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        # Processes that it started itself (data loaders) must not outlive it, nor hold its output open.
        self._signal_group(signal.SIGKILL)
        self._guard.tell("forget", self._process.pid)
        await self._drain()
        return code

    async def _drain(self) -> None:
        """Read the rest of the output. A process that has left the group may hold it open, and is not waited for."""
        heard = -1
        waiting = set(self._pumps)
        while waiting and heard != self._heard:
            heard = self._heard
            _, waiting = await asyncio.wait(waiting, timeout=_QUIET_S)
        for pump in waiting:
            pump.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    @property
    def pid(self) -> int:
        """Its process number, 0 before it starts."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """True between start and exit."""
        return self._process is not None and self._process.returncode is None

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the process to end. Processes that it has started, such as data loaders, end with it, not before it."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the whole group."""
        if self.running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def stop_all(children: Sequence[Child], patience_s: float, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask all to end with this signal, kill those that have not after ``patience_s``."""
    for child in children:
        child.terminate(number)
    waiting = [child.exited for child in children if child.exited is not None and not child.exited.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=patience_s)
    for child in children:
        child.kill()
    waiting = [task for task in waiting if not task.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=5.0)
