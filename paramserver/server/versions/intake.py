"""How much of what is pushed a server takes on at once; the excess is asked to come again, before its bytes are read.

What a synchronous step is made of must be kept whatever its size, so only what is still arriving counts there. An
asynchronous contribution counts until it is in a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paramserver.errors import OverloadedError

# Memory for what is arriving and queued, in bytes, where a few whole contributions do not take more.
BUDGET_BYTES = 256 << 20
_AT_LEAST = 4
_AT_MOST = 1024


class Intake:
    """The contributions that one server has on its hands. Lives in its event loop."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        # How many were asked to come again.
        self.turned_away = 0
        # The most there were at a time.
        self.most = 0
        self._receiving = 0

    @contextmanager
    def receiving(self, queued: int, shard_bytes: int) -> Iterator[None]:
        """While the bytes of a contribution come in. ``queued``: others that wait to be applied.

        ``shard_bytes``: how large a whole contribution is. Raises OverloadedError if there is no room.
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
