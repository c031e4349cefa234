"""The output of each process of a job in files: written by the launcher, bounded, read by ``paramserver logs``.

A file has lines like ``1763893757.123456 text``. The number is the time in seconds. ``worker-0.log.old`` holds the
lines before those of ``worker-0.log``.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from paramserver.processes.lines import GOES_ON, NamedLines, Output

# Bytes of one file. A process has two files at most.
LIMIT = 1 << 20
_LONGEST = 64 << 10
_NEW, _OLD = ".log", ".log.old"


class Line(NamedTuple):
    """A line of a process, and its time in seconds."""

    at: float
    name: str
    text: str


class Logs:
    """Writes the files of all processes of a job, for this user only. ``say`` gets a sentence if that fails."""

    def __init__(self, directory: Path, say: Callable[[str], None], limit: int = LIMIT) -> None:
        self.directory = directory
        self._say = say
        self._limit = limit
        self._failed = False
        self._sizes: dict[str, int] = {}
        directory.mkdir(mode=0o700, exist_ok=True)

    def output(self, name: str) -> Output:
        """Writes a stream of the process ``name``. Its file is there before the process writes anything."""
        self._append(name, b"")
        return NamedLines(name, self.line)

    def line(self, name: str, text: str) -> None:
        """Write a line. Of a progress bar, which is one long line, the last state is written."""
        name = name.removesuffix(GOES_ON)
        text = text.rstrip("\r").rpartition("\r")[2]
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]} … ({len(text)} characters)"
        data = f"{time.time():.6f} {text}\n".encode(errors="backslashreplace")
        self._append(name, data)

    def _append(self, name: str, data: bytes) -> None:
        if self._failed:
            return
        try:
            self._write(name, data)
        except OSError as error:
            self._failed = True
            self._say(f"the output of processes is not kept for `paramserver logs` any more: {error.strerror}")

    def _write(self, name: str, data: bytes) -> None:
        path = self.directory / f"{name}{_NEW}"
        size = self._sizes.get(name, 0)
        if size and size + len(data) > self._limit:
            path.replace(self.directory / f"{name}{_OLD}")
            size = 0
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, data)
        finally:
            os.close(file)
        self._sizes[name] = size + len(data)


def names_in(directory: Path) -> list[str]:
    """The processes that have written something."""
    return sorted(path.name.removesuffix(_NEW) for path in directory.glob(f"*{_NEW}"))


class Reader:
    """Reads the lines of one process, from the oldest that was kept. Must be closed.

    A reader that is behind by more than two files misses lines.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path, self._old = directory / f"{name}{_NEW}", directory / f"{name}{_OLD}"
        self._name = name
        self._rest = b""
        self._file: io.FileIO | None = None

    def lines(self) -> Iterator[Line]:
        """The lines that have been written since the last call."""
        if self._file is None:
            self._file = self._open(self._old) or self._open(self._path)
        while self._file is not None:
            yield from self._read(self._file)
            following = self._following(self._file)
            if following is None:
                return
            self.close()
            self._file = following

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, file: io.FileIO) -> Iterator[Line]:
        *ended, self._rest = (self._rest + (file.readall() or b"")).split(b"\n")
        for line in ended:
            stamp, _, text = line.decode(errors="backslashreplace").partition(" ")
            yield Line(float(stamp), self._name, text)

    def _following(self, file: io.FileIO) -> io.FileIO | None:
        """The next file, if the file that was read is not the newest any more."""
        facts = os.fstat(file.fileno())
        try:
            if os.path.samestat(facts, self._path.stat()):
                return None
            put_aside = os.path.samestat(facts, self._old.stat())
        except FileNotFoundError:  # the job has ended
            return None
        if put_aside:  # after it was read, perhaps
            self._rest += file.readall() or b""
            return self._open(self._path)
        self._rest = b""
        return self._open(self._old)

    @staticmethod
    def _open(path: Path) -> io.FileIO | None:
        try:
            return io.FileIO(path)
        except FileNotFoundError:
            return None
