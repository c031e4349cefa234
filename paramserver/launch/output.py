"""Where the output of a process goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.processes.lines import Output


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
