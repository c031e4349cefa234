"""Asynchronous mode: workers begin no other slice while a checkpoint is taken, so that all shards count the same.

A shard holds them by itself as soon as it has made a version of which a checkpoint is due, before anybody hears of
that version. What workers have begun by then is at most one slice each, so the checkpoint comes at most as many slices
later as there are other workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paramserver.core.versions.events import Event, Held
from paramserver.server.saving.saver import Saver

# How long workers are held for a checkpoint that no coordinator begins.
_ALONE_S = 3.0


class Holding:
    """Whether workers of one shard are held. ``happen`` tells the shard."""

    def __init__(self, saver: Saver | None, happen: Callable[[Event], None]) -> None:
        self._saver, self._happen = saver, happen
        self._timer: asyncio.TimerHandle | None = None
        # No coordinator came when a checkpoint was due; no other is held for until one is heard of.
        self._left_alone = False

    def look(self, version: int) -> None:
        """A version is about to be published: if a checkpoint of it is due, hold the workers and say so."""
        if self._saver is None or not self._saver.due(version):
            return
        if self._saver.room and not self._left_alone:
            self.begin(_ALONE_S, self._leave_alone)
        self._saver.told()

    def begin(self, limit_s: float, after: Callable[[], None] | None = None) -> None:
        """Hold the workers, for so long at most; then call ``after`` (None: let them go)."""
        self.forget()
        self._happen(Held(True))
        self._timer = asyncio.get_running_loop().call_later(limit_s, after or self.end)

    def end(self) -> None:
        """Let the workers go on."""
        self.forget()
        self._happen(Held(False))

    def commanded(self) -> None:
        """A coordinator looks after checkpoints."""
        self._left_alone = False

    def forget(self) -> None:
        """Nothing is to be ended any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave_alone(self) -> None:
        self._left_alone = True
        self.end()
