"""Interfaces to the file systems that checkpoints lie on: a local disk, and whatever fsspec knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

Bytes = bytes | memoryview


class Closing:
    """An object that a ``with`` block closes."""

    def close(self) -> None:
        """Close all files."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(Protocol):
    """A file being written under a temporary name. Ends with ``commit`` or with ``discard``. Errors are OSError."""

    def write(self, data: Bytes) -> None:
        """Append bytes."""

    def sync(self) -> None:
        """Return when all bytes are on the medium."""

    def commit(self, name: str) -> None:
        """Give the file its name, at once; a file of that name is replaced."""

    def sync_folder(self) -> None:
        """Return when the name is on the medium, too."""

    def discard(self) -> None:
        """Remove the file, if it still has its temporary name. Never raises OSError."""


def write_whole(writer: Writer, name: str, content: Iterable[Bytes]) -> None:
    """Write a file and give it its name; discard the file if anything goes wrong."""
    try:
        for part in content:
            writer.write(part)
        writer.sync()
        writer.commit(name)
        writer.sync_folder()
    except BaseException:
        writer.discard()
        raise


class Reader(Protocol):
    """An open file. ``read`` may be called by several threads at once. Errors are OSError."""

    size: int

    def read(self, start: int, count: int) -> bytes:
        """``count`` bytes from ``start`` on, fewer only at the end of the file."""

    def close(self) -> None:
        """Close the file."""


class Folder(Protocol):
    """One checkpoint: a directory of files, which need not exist yet. The caller checks names. Errors are OSError."""

    shown: str

    def files(self) -> list[str]:
        """The names of the files; none if the directory does not exist."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none of that name."""

    def open(self, name: str) -> Reader:
        """Open for reading."""

    def create(self, temporary: str) -> Writer:
        """Begin a file, and the directory if need be."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_folder(self) -> None:
        """Remove the directory, if it is there and empty."""


class Root(Protocol):
    """The directory that holds the checkpoints. Errors are OSError."""

    def prepare(self) -> None:
        """Create the directory and try to write into it. Raises ConfigError that says what to do."""

    def folders(self) -> Sequence[str]:
        """The names of the directories in this one; none if this one does not exist."""

    def folder(self, name: str) -> Folder:
        """The directory of that name, which need not exist yet."""

    def top(self) -> Folder:
        """The files that lie beside the directories; creating one does not create the directory that holds it."""

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of this directory, where the file system has locks."""

    def make(self, sibling: str) -> str:
        """Create another directory beside this one; returns where. FileExistsError if there is something of that name.

        A directory of a disk that is mounted there by itself gets the other one inside.
        """

    def move(self, name: str, sibling: str) -> None:
        """Move a directory or file of this one into ``sibling``, which :meth:`make` has made."""

    def holds(self, path: str) -> bool:
        """Whether ``path``, an absolute path of this machine, is this directory."""
