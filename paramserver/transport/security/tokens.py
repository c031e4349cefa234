"""Tokens: fixed ones, or the lines of a file, which may be replaced while the process runs."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from paramserver.errors import ConfigError
from paramserver.transport.security.files import Watched, read_secret

MIN_TOKEN_CHARS = 16


class Tokens(Watched[tuple[str, ...]]):
    """The tokens that are accepted, the first of which is shown to others: fixed ones, or the lines of a file.

    Raises ConfigError if the file cannot be used. A later mistake in the file is logged, and the tokens stay.
    ``awaited``: the file may come later; until then there is no token.
    """

    def __init__(
        self, fixed: Sequence[str] = (), path: Path | None = None, what: str = "token file", awaited: bool = False
    ) -> None:
        self._path = path
        self._what = what
        self._awaited = awaited
        self._fixed = tuple(_checked(token, f"token {index + 1}") for index, token in enumerate(fixed))
        super().__init__("tokens", () if path is None else (path,))

    def __repr__(self) -> str:
        return f"Tokens({self._path or 'fixed'}, {len(self._value)} of them)"

    def __bool__(self) -> bool:
        return bool(self._value)

    @property
    def path(self) -> Path | None:
        """The file, if the tokens are its lines."""
        return self._path

    def current(self) -> tuple[str, ...]:
        """See `Watched`. A file that is awaited is looked for each time."""
        if self._awaited and not self._value:
            self.look()
        return super().current()

    def first(self) -> str:
        """The token to show; empty if there is none."""
        return next(iter(self.current()), "")

    def accept(self, shown: str) -> bool:
        """Whether ``shown`` is one of the tokens. Takes equally long however much of ``shown`` is right."""
        given = shown.encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, token.encode()) for token in self.current()]
        return any(matches)

    def _load(self) -> tuple[str, ...]:
        if self._path is None:
            return self._fixed
        if self._awaited and not self._path.exists() and not getattr(self, "_value", ()):
            return ()  # but a file that is gone again takes no token back: that would open this process to everybody
        lines = read_secret(self._path, self._what).decode("utf-8", "replace").splitlines()
        found = tuple(
            _checked(line.strip(), f'line {number} of {self._what} "{self._path}"')
            for number, line in enumerate(lines, 1)
            if line.strip()
        )
        if not found:
            raise ConfigError(f'{self._what} "{self._path}" is empty; write a token into it')
        return found

    def _facts(self, value: tuple[str, ...]) -> dict[str, object]:
        return {"file": str(self._path), "tokens": len(value)}


def _checked(token: str, where: str) -> str:
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where} is no token: it takes {MIN_TOKEN_CHARS} or more letters, digits and signs without spaces"
        )
    return token
