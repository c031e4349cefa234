"""Bytes that come in pieces, as lines of text: nothing is left out."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

# Longer lines are passed on in pieces of so many bytes, so that a line without an end does not fill the memory.
LONGEST = 16 << 20
# Behind the name of the process, where such a piece is not the first.
GOES_ON = " (the same line goes on)"

# Escape sequences other than colours, and control characters: they steer a terminal.
_UNSAFE = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b(?!\[[0-9;:]*m)(?:\[[0-?]*[ -/]*[@-~]?|.)?"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


class Output(Protocol):
    """Takes one stream of a process."""

    def feed(self, data: bytes) -> None:
        """The next bytes."""

    def end(self) -> None:
        """The stream is over."""


def harmless(text: str) -> str:
    """The text of a script with its colours, and without anything else that steers a terminal."""
    return _UNSAFE.sub("", text)


def plain(text: str) -> str:
    """The text of a script without colours and without anything else that steers a terminal."""
    return _COLOURS.sub("", harmless(text))


class Lines:
    """Cuts one stream into lines. Bytes that are not UTF-8 appear as ``\\xff``.

    >>> lines = Lines()
    >>> list(lines.feed(b"one\\ntw"))
    [(False, 'one')]
    >>> list(lines.feed(b"o\\r\\nthree")), list(lines.end())
    ([(False, 'two')], [(False, 'three')])
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._held = 0
        self._goes_on = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes) -> Iterator[tuple[bool, str]]:
        """The lines that end in ``data``, without their ends. True marks text that continues the last line."""
        *ended, rest = data.split(b"\n")
        for line in ended:
            yield from self._take(line)
            yield self._line()
        yield from self._take(rest)

    def end(self) -> Iterator[tuple[bool, str]]:
        """The stream is over. Yields the text after the last end of a line, if there is any."""
        if self._held or self._goes_on:
            yield self._line()

    def _take(self, data: bytes) -> Iterator[tuple[bool, str]]:
        while self._held + len(data) > self._longest:
            room = self._longest - self._held
            self._keep(data[:room])
            data = data[room:]
            text, goes_on = self._decoder.decode(self._all()), self._goes_on
            self._goes_on = True
            yield goes_on, text
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._held += len(data)

    def _all(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        return data

    def _line(self) -> tuple[bool, str]:
        text, goes_on = self._decoder.decode(self._all(), final=True), self._goes_on
        self._decoder.reset()
        self._goes_on = False
        return goes_on, text.removesuffix("\r")


class NamedLines:
    """An output that gives ``on_line(name, text)`` each line of a process."""

    def __init__(self, name: str, on_line: Callable[[str, str], None]) -> None:
        self._name = name
        self._on_line = on_line
        self._lines = Lines()

    def feed(self, data: bytes) -> None:
        """Pass on the lines that end in ``data``."""
        self._pass_on(self._lines.feed(data))

    def end(self) -> None:
        """Pass on the rest."""
        self._pass_on(self._lines.end())

    def _pass_on(self, lines: Iterable[tuple[bool, str]]) -> None:
        for goes_on, text in lines:
            self._on_line(self._name + GOES_ON if goes_on else self._name, text)


class Outputs:
    """An output that passes everything on to several others. ``wanted``: whether the first one is to have it, too."""

    def __init__(self, outputs: Sequence[Output], wanted: Callable[[], bool]) -> None:
        self._outputs = outputs
        self._wanted = wanted

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        for output in self._outputs if self._wanted() else self._outputs[1:]:
            output.feed(data)

    def end(self) -> None:
        """The stream is over."""
        for output in self._outputs:
            output.end()


class OnceHeard:
    """An output that is made when the first bytes come. ``make``: makes it."""

    def __init__(self, make: Callable[[], Output]) -> None:
        self._make = make
        self._output: Output | None = None

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        if self._output is None:
            self._output = self._make()
        self._output.feed(data)

    def end(self) -> None:
        """The stream is over."""
        if self._output is not None:
            self._output.end()
