"""Secrets in files, which only their owner may read, and tokens that are replaced while the process runs."""

from __future__ import annotations

import hmac
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from paramserver.errors import ConfigError

# A file is looked at again at most this often.
LOOK_S = 1.0
MIN_TOKEN_CHARS = 16
# A longer file is no token, no key and no certificate.
MAX_FILE_BYTES = 1 << 20

log = structlog.get_logger("paramserver.security")

Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp:
    """Numbers that change when the file is replaced or written to. Raises OSError."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


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


class Tokens:
    """The tokens that are accepted, the first of which is shown to others: fixed ones, or the lines of a file.

    Raises ConfigError if the file cannot be used. A later mistake in the file is logged, and the tokens stay.
    """

    def __init__(self, fixed: Sequence[str] = (), path: Path | None = None, what: str = "token file") -> None:
        self._path = path
        self._what = what
        self._tokens = tuple(_checked(token, f"token {index + 1}") for index, token in enumerate(fixed))
        self._stamp: Stamp | None = None
        self._looked = 0.0
        self._complaint = ""
        if path is not None:
            self._tokens = self._load(path)
            self._looked = time.monotonic()

    def __repr__(self) -> str:
        return f"Tokens({self._path or 'fixed'}, {len(self._tokens)} of them)"

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def first(self) -> str:
        """The token to show; empty if there is none."""
        self._refresh()
        return self._tokens[0] if self._tokens else ""

    def accept(self, shown: str) -> bool:
        """Whether ``shown`` is one of the tokens. Takes equally long however much of ``shown`` is right."""
        self._refresh()
        given = shown.encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, token.encode()) for token in self._tokens]
        return any(matches)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        complaint = ""
        try:
            if stamp(self._path) != self._stamp:
                self._tokens = self._load(self._path)
                log.info("read the tokens again", file=str(self._path), tokens=len(self._tokens))
        except OSError as error:
            complaint = f'{self._what} "{self._path}" cannot be read: {error.strerror}'
        except ConfigError as error:
            complaint = str(error)
        if complaint and complaint != self._complaint:
            log.warning("the tokens stay as they were", reason=complaint)
        self._complaint = complaint

    def _load(self, path: Path) -> tuple[str, ...]:
        try:
            seen: Stamp | None = stamp(path)
        except OSError:
            seen = None  # the next line says what is wrong
        lines = read_secret(path, self._what).decode("utf-8", "replace").splitlines()
        found = tuple(
            _checked(line.strip(), f'line {number} of {self._what} "{path}"')
            for number, line in enumerate(lines, 1)
            if line.strip()
        )
        if not found:
            raise ConfigError(f'{self._what} "{path}" is empty; write a token into it')
        self._stamp = seen
        return found


def _checked(token: str, where: str) -> str:
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where} is no token: it takes {MIN_TOKEN_CHARS} or more letters, digits and signs without spaces"
        )
    return token
