"""Secrets in files, which only their owner may read, and which may be replaced while the process runs."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from paramserver.errors import ConfigError

# A file is looked at again at most this often.
LOOK_S = 1.0
# A longer file is no token, no key and no certificate.
MAX_FILE_BYTES = 1 << 20

T = TypeVar("T")

log = structlog.get_logger("paramserver.security")


def read(path: Path, what: str) -> bytes:
    """The contents of a file. Raises ConfigError; ``what`` says what the file is for."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f'{what} "{path}" cannot be read: {(error.strerror or "error").lower()}') from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f'{what} "{path}" is no such file: it has more than {MAX_FILE_BYTES} bytes')
    return content


def read_secret(path: Path, what: str) -> bytes:
    """Like `read`, for a file that only its owner may read.

    A file of root may be readable by its group, for processes that are not root: that is how containers get secrets.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f'{what} "{path}" cannot be read: {(error.strerror or "error").lower()}') from error
    spare = 0o037 if found.st_uid == 0 and os.geteuid() != 0 else 0o077
    if stat.S_IMODE(found.st_mode) & spare:
        raise ConfigError(f'{what} "{path}" can be read by others than its owner; run: chmod 600 "{path}"')
    return read(path, what)


class Watched(Generic[T]):
    """A value made of files, and made again when the files are replaced. Safe in any thread.

    A later mistake in the files is logged once, and the value stays.
    """

    def __init__(self, what: str, paths: Sequence[Path]) -> None:
        """``what``: the files' contents, for the log. Raises ConfigError if the files cannot be used."""
        self._contents, self._paths = what, paths
        self._complaint = ""
        self._stamps = self._stamp()
        self._value = self._load()
        self._looked = time.monotonic()

    def _load(self) -> T:
        """Read the files. Raises ConfigError if they cannot be used."""
        raise NotImplementedError

    def _facts(self, value: T) -> dict[str, object]:
        """The facts that the log has about a value that was read again."""
        raise NotImplementedError

    def current(self) -> T:
        """The value to use now. The files are looked at once a second at most."""
        if time.monotonic() - self._looked >= LOOK_S:
            self.look()
        return self._value

    def look(self) -> None:
        """Read the files again if they have changed."""
        self._looked = time.monotonic()
        stamps = self._stamp()
        if stamps == self._stamps:
            return
        try:
            self._value, self._stamps, self._complaint = self._load(), stamps, ""
            log.info(f"read the {self._contents} again", **self._facts(self._value))
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning(f"the {self._contents} stay as they were", reason=self._complaint)

    def _stamp(self) -> list[tuple[int, int, int]]:
        """Numbers that change when a file is replaced or written to; none if a file cannot be found."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return []
        return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]
