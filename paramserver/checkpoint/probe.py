"""Whether two machines see the same place: one writes a question, the other reads it there and writes the answer."""

from __future__ import annotations

import contextlib
import secrets

from paramserver.checkpoint.names import is_temporary, temporary_name
from paramserver.checkpoint.place import Place
from paramserver.errors import CheckpointError

_BYTES = 32


class Question:
    """A file for another machine to read, and the name of the answer. Use as a context manager.

    Raises CheckpointError if the file cannot be written.
    """

    def __init__(self, place: Place) -> None:
        self.name, self.answer = temporary_name("question"), temporary_name("answer")
        self._place, self._text = place, secrets.token_hex(_BYTES).encode()

    def __enter__(self) -> Question:
        self._place.top.write_atomically(self.name, self._text)
        return self

    def __exit__(self, *error: object) -> None:
        for name in (self.name, self.answer):
            with contextlib.suppress(CheckpointError):
                self._place.top.remove(name)

    def check(self) -> None:
        """Raises CheckpointError if the answer is not there."""
        if self._place.top.read(self.answer, 2 * _BYTES) != self._text:
            raise CheckpointError(f"{self._place.top.where(self.answer)} is no answer to what was asked")


def answer(place: Place, question: str, name: str) -> None:
    """Read a question and write the answer. Raises CheckpointError if either fails."""
    if not (is_temporary(question) and is_temporary(name)):
        raise CheckpointError("these are no names of a question and an answer")
    place.top.write_atomically(name, place.top.read(question, 2 * _BYTES))
