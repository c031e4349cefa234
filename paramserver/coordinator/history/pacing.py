"""When the next checkpoint is due, between the first and the last version: by versions, or by time."""

from __future__ import annotations

import time

from paramserver.coordinator.options import CheckpointOptions
from paramserver.core.versions.consistency import Mode

# If nobody has asked for them, checkpoints take at most this part of the time.
_SHARE = 0.05
# With ``rising``, there is one after this part of the time since the beginning, but not within so many seconds.
_RISING_SHARE, _FIRST_S = 0.1, 5.0


class Pacing:
    """The checkpoints that the coordinator has to begin. With ``every``, synchronous shards begin them by themselves.

    ``every_s`` counts only if ``every`` is 0.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        self._every = options.every if options.place else 0
        self._every_s = options.every_s if options.place and not options.every else 0.0
        self._wished_s, self._sparing = self._every_s, options.sparing
        self._rising_since = time.monotonic() if options.rising else None
        # No checkpoint is taken at versions that are not multiples of this.
        self._multiple = max(1, options.multiple)
        # With ``every``: the version at which the next one is due.
        self._next = options.every
        # With ``every_s``: when the newest one was begun (monotonic seconds), and its version.
        self._begun, self._newest = time.monotonic(), 0

    def restart(self, version: int) -> None:
        """The job goes on from ``version``, on another timeline."""
        self._begun, self._newest = time.monotonic(), version
        self._pass(version)

    def took(self, seconds: float) -> None:
        """A checkpoint has taken so many seconds."""
        if self._sparing and self._every_s:
            self._every_s = max(self._wished_s, seconds / _SHARE)

    def due(self, reached: int, mode: Mode) -> bool:
        """Whether a checkpoint has to be begun now. ``reached``: the newest version of any shard."""
        if self._every:
            return mode is Mode.ASYNC and reached >= self._next
        now, wanted = time.monotonic(), self._every_s
        if self._rising_since is not None:
            wanted = min(wanted, max(_FIRST_S, _RISING_SHARE * (now - self._rising_since)))
        return wanted > 0 and reached > self._newest and now - self._begun >= wanted

    def begun(self, version: int) -> None:
        """A checkpoint of this version, or soon after, is on its way, or was tried in vain."""
        self._begun, self._newest = time.monotonic(), max(self._newest, version)
        self._pass(max(version, self._next - 1))

    def possible(self, version: int) -> int:
        """The first version from this one on at which a checkpoint may be taken."""
        return -(-version // self._multiple) * self._multiple

    def _pass(self, version: int) -> None:
        self._next = (version // self._every + 1) * self._every if self._every else 0
