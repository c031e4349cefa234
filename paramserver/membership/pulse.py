"""Notices when a process does not run: it beats ten times a second, and looks at what came between two beats."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque

from paramserver.core.blame.spent import Lost, lost_within

_BEAT_S = 0.1
_KEPT = 1024
# A process that was stopped used none of the time in which it did not beat; a busy one used it up.
_IDLE = 0.1
_LATE_S = 0.1
# Shorter waits for a core are noise.
_LEAST_S = 0.002


class Pulse:
    """Losses of the thread that makes it: waits for a core (Linux tells), and times in which the process stood still.

    :meth:`run` belongs into an event loop of the same process, in whichever thread.
    """

    def __init__(self) -> None:
        # When it last beat (monotonic seconds): losses before are known.
        self.beat_at = 0.0
        self._losses: deque[Lost] = deque(maxlen=_KEPT)
        self._thread = threading.get_native_id()

    def within(self, begin: float, end: float) -> tuple[float, float]:
        """(starved, paused) seconds between two moments."""
        return lost_within(list(self._losses), begin, end)

    async def run(self) -> None:
        """Beat until cancelled."""
        file, own = _open(self._thread), _open(threading.get_native_id())
        try:
            at, used, queued, late = time.monotonic(), time.process_time(), _queued(file), _queued(own)
            while True:
                self.beat_at = at
                await asyncio.sleep(_BEAT_S)
                before, used_before, queued_before, late_before = at, used, queued, late
                at, used, queued, late = time.monotonic(), time.process_time(), _queued(file), _queued(own)
                self._note(before, at, used - used_before, queued - queued_before, late - late_before)
        finally:
            for each in (file, own):
                if each >= 0:
                    os.close(each)

    def _note(self, begin: float, end: float, used: float, starved: float, beat_starved: float) -> None:
        """From ``begin`` to ``end`` the process used cores for ``used`` seconds, and waited for one for ``starved``.

        ``beat_starved``: the same wait of the thread that beats, which is no pause.
        """
        late = end - begin - _BEAT_S
        paused = late if late > _LATE_S and used < _IDLE * late and beat_starved < late / 2 else 0.0
        if paused or starved > _LEAST_S:
            self._losses.append(Lost(begin, end, starved, paused))


def _open(thread: int) -> int:
    """The scheduler's account of a thread; -1 on other systems, where waits for a core are not seen."""
    try:
        return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _queued(file: int) -> float:
    """Seconds for which a thread has been ready and waited for a core, so far."""
    if file < 0:
        return 0.0
    try:
        return int(os.pread(file, 100, 0).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # the thread has ended
        return 0.0
