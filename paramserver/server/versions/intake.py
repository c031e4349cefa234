"""Bounds the contributions that a server receives at once. Others are refused before their bytes are read.

The contributions of a synchronous step must be kept whatever their size, so only those still being received count. An
asynchronous contribution counts until it is in a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paramserver.errors import OverloadedError

# Memory for contributions being received or queued, in bytes. A few whole contributions are always allowed.
BUDGET_BYTES = 256 << 20
_AT_LEAST = 4
_AT_MOST = 1024


class Intake:
    """The contributions that one server is receiving or has queued. Lives in its event loop."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        # The number of refused contributions.
        self.turned_away = 0
        # The largest number at a time.
        self.most = 0
        self._receiving = 0

    @contextmanager
    def receiving(self, queued: int, shard_bytes: int) -> Iterator[None]:
        """Context in which a contribution is received. ``queued``: contributions that wait to be applied.

        ``shard_bytes``: size of a whole contribution. Raises OverloadedError if there is no room.
        """
        room = min(_AT_MOST, max(_AT_LEAST, self.budget_bytes // max(shard_bytes, 1)))
        present = self._receiving + queued
        if present >= room:
            self.turned_away += 1
            raise OverloadedError(f"this server has {present} contributions on its hands already: try again soon")
        self._receiving += 1
        self.most = max(self.most, present + 1)
        try:
            yield
        finally:
            self._receiving -= 1
