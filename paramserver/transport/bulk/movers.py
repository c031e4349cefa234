"""The threads of a process that move bytes between sockets and memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_THREADS = 8


class Movers:
    """See above. All lines of a process share them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="bulk")
        # Work for which no thread is free yet.
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def wanted(self) -> bool:
        """Whether work waits for a thread."""
        return bool(self._waiting)

    def do(self, work: Callable[[], None]) -> None:
        """Do this in a thread. It raises nothing."""
        self._waiting.append(work)
        self._threads.submit(self._next)

    def _next(self) -> None:
        self._waiting.popleft()()


@cache
def movers() -> Movers:
    """The threads of this process."""
    return Movers()
