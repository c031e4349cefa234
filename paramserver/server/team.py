"""A few threads that do independent pieces of arithmetic side by side; torch lets go of the GIL while it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Team:
    """``threads`` in all; the caller of :meth:`each` is one of them."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = max(1, threads)
        self._helpers = ThreadPoolExecutor(self._threads - 1, "arithmetic-helper") if self._threads > 1 else None

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results of ``work`` for all items, in their order; the items are begun in order, too.

        The first error is raised when no thread is at work any more; items after it may not have been begun.
        """
        todo = list(enumerate(items))
        if self._helpers is None or len(todo) < 2:
            return [work(item) for _, item in todo]
        found: dict[int, R] = {}
        waiting, lock, failed = iter(todo), threading.Lock(), threading.Event()

        def go() -> None:
            while not failed.is_set():
                with lock:
                    number, item = next(waiting, (-1, None))
                if item is None and number < 0:
                    return
                try:
                    found[number] = work(item)  # type: ignore[arg-type]
                except BaseException:
                    failed.set()
                    raise

        others = [self._helpers.submit(go) for _ in range(min(self._threads, len(todo)) - 1)]
        try:
            go()
        finally:
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error
        return [found[number] for number, _ in todo]

    def close(self) -> None:
        """End the threads."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)
