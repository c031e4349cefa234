"""The output of one process as a terminal would show it: finished lines, and progress bars that are drawn anew.

A progress bar such as tqdm's goes back to the begin of its line (a carriage return) and writes the line again. Nested
bars go down with an end of line and up again with an escape sequence. Such rows are not finished when their line ends.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from paramserver.processes.lines import GOES_ON, LONGEST

_MOVES = re.compile(r"(\n|\r|\x1b\[\d*A)")
# The begin of an escape sequence whose rest has not come yet.
_CUT = re.compile(r"\x1b(\[\d*)?$")
# Most rows of one stream that are not finished; the top one is finished when there would be more.
_MOST_ROWS = 8


class Rows:
    """One stream. ``commit(name, text)`` gets each row when nothing can change the row any more.

    Errors of the encoding appear as ``\\xff``. Escape sequences other than "one row up" stay in the text.
    """

    def __init__(self, name: str, commit: Callable[[str, str], None]) -> None:
        self.name = name
        self._commit = commit
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""
        self._rows = [_Row()]
        self._at = 0

    @property
    def bars(self) -> list[str]:
        """The present states of the progress bars, from the top to the bottom."""
        return [text for row in self._rows if row.bar and (text := row.text.rstrip())]

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._take(self._held + self._decoder.decode(data))

    def end(self) -> None:
        """The stream is over."""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        self._rows[self._at].write(text)
        self._finish(len(self._rows), last=True)

    def _take(self, text: str) -> None:
        cut = _CUT.search(text)
        self._held = cut.group() if cut else ""
        for piece in _MOVES.split(text.removesuffix(self._held)):
            if piece == "\n":
                self._down()
            elif piece == "\r":
                self._rows[self._at].back()
            elif piece.startswith("\x1b[") and piece.endswith("A"):
                self._at = max(0, self._at - int(piece[2:-1] or 1))
            elif piece:
                self._write(piece)

    def _write(self, text: str) -> None:
        row = self._rows[self._at]
        while row.size + len(text) > LONGEST:
            room = max(0, LONGEST - row.size)
            row.write(text[:room])
            text = text[room:]
            self._finish(self._at + 1)
            row = self._rows[0]
            row.goes_on = True
        row.write(text)

    def _down(self) -> None:
        row = self._rows[self._at]
        self._at += 1
        if self._at < len(self._rows):
            self._rows[self._at].enter()
        elif not row.bar:
            self._finish(self._at)
        else:
            self._rows.append(_Row())
            if len(self._rows) > _MOST_ROWS:
                self._finish(1)

    def _finish(self, count: int, last: bool = False) -> None:
        """Commit the first rows. ``last``: an empty row at the end is no row."""
        done, self._rows = self._rows[:count], self._rows[count:] or [_Row()]
        self._at = max(0, self._at - count)
        if last and not done[-1].size and not done[-1].goes_on:
            done.pop()
        for row in done:
            text = row.text
            if row.bar and not text.strip():
                continue  # a bar that was wiped out
            self._commit(self.name + GOES_ON if row.goes_on else self.name, text.rstrip() if row.bar else text)


class _Row:
    """One row. ``col``: where the next character goes. ``bar``: its text was written over after a carriage return."""

    def __init__(self) -> None:
        self.col = self.size = 0
        self.bar = self.goes_on = self._returned = False
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def enter(self) -> None:
        self.col, self._returned = 0, False

    def back(self) -> None:
        self.col, self._returned = 0, True

    def write(self, text: str) -> None:
        if not text:
            return
        if self.col == 0:
            if not self._returned and not self.text.strip():
                self._parts, self.size = [], 0
            self.bar = self._returned
        self._returned = False
        if self.col >= self.size:
            self._parts.append(text)
        else:
            old = self.text
            self._parts = [old[: self.col] + text + old[self.col + len(text) :]]
        self.col += len(text)
        self.size = max(self.size, self.col)
