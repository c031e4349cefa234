"""How a process is started: the seam between those who want a process and the ways to make one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start. It begins a session of its own.

    ``argv``: program and arguments. ``environment``: all of its variables. ``stdout``, ``stderr``: descriptors; None:
    those of this process. ``pass_fds``: descriptors that keep their numbers. ``light``: the program imports little.
    ``stdin``: a descriptor; None: there is nothing to read.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    stdout: int | None = None
    stderr: int | None = None
    pass_fds: Sequence[int] = ()
    light: bool = False
    stdin: int | None = None


def python(module: str) -> list[str]:
    """The command line of a module of this package.

    Modules of the current directory do not stand in for those of the standard library, unless this package itself is
    found there only.
    """
    home = str(Path(__file__).resolve().parents[2])
    places = [os.path.realpath(place) for place in sys.path]
    found = home in (places[1:] if places[0] == os.path.realpath(os.curdir) else places)
    return [sys.executable, *(["-P"] if found else []), "-m", module]


class Started(Protocol):
    """A child process of this process. `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int:
        """Its process number."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code; below 0, a signal has ended the process. None while the process runs."""
        ...

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        ...


class Starter(Protocol):
    """A way to make processes."""

    async def start(self, command: Command) -> Started:
        """Start a process. Must be called in the main thread, with which the process dies. Raises OSError."""
        ...


class Executing:
    """Starts each program by itself."""

    async def start(self, command: Command) -> Started:
        """Start a process that runs the program from its beginning. Raises OSError."""
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=dict(command.environment),
            stdin=asyncio.subprocess.DEVNULL if command.stdin is None else command.stdin,
            stdout=command.stdout,
            stderr=command.stderr,
            start_new_session=True,
            pass_fds=command.pass_fds,
        )
