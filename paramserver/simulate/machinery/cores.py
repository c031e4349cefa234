"""The processors of a host: all threads that compute at the same time share them evenly."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

from paramserver.simulate.machinery.clock import Alarm, VirtualClock


class Cores:
    """``count`` processors, possibly infinite. With more threads than cores all threads have the same lower speed."""

    def __init__(self, clock: VirtualClock, count: float = math.inf) -> None:
        self._clock, self._count = clock, count
        # Of each task: the value of ``_got`` at which it is done, a number, its threads, the function to call then.
        self._tasks: list[tuple[float, int, float, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._threads = 0.0
        # Seconds that a thread would have computed from the beginning until ``_since``.
        self._got, self._since = 0.0, 0.0
        self._alarm: Alarm | None = None

    def run(self, seconds: float, then: Callable[[], None], threads: float = 1.0) -> None:
        """Compute for so many seconds, longer if there are too few cores; then call ``then``."""
        if math.isinf(self._count):
            self._clock.after(seconds, then)
            return
        self._pass()
        heapq.heappush(self._tasks, (self._got + seconds, next(self._numbers), threads, then))
        self._threads += threads
        self._expect()

    @property
    def _speed(self) -> float:
        return min(1.0, self._count / self._threads) if self._threads else 1.0

    def _pass(self) -> None:
        """Account for the time since the last change."""
        self._got += (self._clock.now - self._since) * self._speed
        self._since = self._clock.now

    def _expect(self) -> None:
        """Plan an action for the end of the first task."""
        if self._alarm is not None:
            self._alarm.cancel()
        left = max(0.0, self._tasks[0][0] - self._got)
        self._alarm = self._clock.after(left / self._speed, self._over)

    def _over(self) -> None:
        self._pass()
        done, _, threads, then = heapq.heappop(self._tasks)
        self._threads -= threads
        self._alarm = None
        if self._tasks:
            self._got = max(self._got, done)
            self._expect()
        else:
            self._threads = self._got = 0.0
        then()


class Thread:
    """Does one piece of work at a time, first come first served. ``threads``: the number of cores in use at once."""

    def __init__(self, cores: Cores, threads: float = 1.0) -> None:
        self._cores, self._threads = cores, threads
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = False

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """One more piece of work, of so many seconds. Work of 0 seconds is done at once if no other work waits."""
        if not seconds and not self._busy:
            then()
            return
        self._waiting.append((seconds, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            seconds, then = self._waiting.popleft()
            self._cores.run(seconds, lambda: self._over(then), self._threads)

    def _over(self, then: Callable[[], None]) -> None:
        then()
        self._next()
