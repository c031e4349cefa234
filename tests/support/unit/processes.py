"""A process that is made up: the launcher's decisions are tested without real ones."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Sequence

_pids = itertools.count(100)


class Process:
    """Stands for a `Child`. It runs until :meth:`end`, or until it is told to; ``deaf``: it does not hear signals."""

    def __init__(self, name: str, replaces: Sequence[int], deaf: bool = False) -> None:
        self.name = name
        self.replaces = list(replaces)
        self.pid = next(_pids)
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # The signals that it was sent.
        self.told: list[signal.Signals] = []
        self._deaf = deaf

    @property
    def running(self) -> bool:
        """See `Child`."""
        return not self.exited.done()

    def end(self, code: int) -> None:
        """It ends with this exit code."""
        self.exited.set_result(code)

    def kill(self) -> None:
        """See `Child`."""
        self.end(-9)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """See `Child`."""
        if self.running:
            self.told.append(number)
            if not self._deaf:
                self.end(128 + number)
