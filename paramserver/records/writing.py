"""Closed steps go to the file and to trackers: each has a thread of its own, so that none delays another."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from paramserver.core.records.steps import StepValues
from paramserver.records.trackers import Tracker

log = structlog.get_logger("paramserver.records")

# So many steps wait for a tracker.
WAITING = 20_000


class Writing:
    """The threads. :meth:`write` never blocks; :meth:`close` waits for a limited time.

    ``promised``: what has to have all values, beside the trackers, which other people keep. If it misses some,
    ``missed`` is called with a sentence, from any thread.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        promised: Tracker | None = None,
        missed: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._threads = [_Thread(tracker) for tracker in trackers]
        if promised is not None:
            self._threads.append(_Thread(promised, missed))

    def write(self, steps: Sequence[StepValues]) -> None:
        """These steps were closed now."""
        now = time.time()
        for thread in self._threads:
            for step in steps:
                thread.put((step, now))

    def settle(self, timeout_s: float = 8.0) -> None:
        """Wait until what is promised has all steps up to now; calls ``missed`` if it has not after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.settle(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = 8.0) -> None:
        """Write what waits, and end; says which trackers have not ended after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            if not thread.ended(max(0.0, deadline - time.monotonic())):
                log.warning(f"{thread.name} has not taken all logged values within {timeout_s:g} s: some are lost")


class _Thread:
    def __init__(self, tracker: Tracker, missed: Callable[[str], None] | None = None) -> None:
        self.name = tracker.name
        self._tracker = tracker
        # None: nobody relies on it.
        self._promised = missed
        # Steps, marks to be set when all before them is written, and None at the end.
        self._queue: queue.Queue[tuple[StepValues, float] | threading.Event | None] = queue.Queue()
        # Set when nothing is written any more, after `missed` was called.
        self._failed = threading.Event()
        self._full = False
        # A thread that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"records {self.name}", daemon=True)
        self._thread.start()

    def _missed(self, sentence: str) -> None:
        if self._promised is not None:
            self._promised(sentence)

    def settle(self, timeout_s: float) -> None:
        if self._promised is None or self._failed.is_set():
            return
        mark = threading.Event()
        self._queue.put(mark)
        if self._failed.is_set():  # meanwhile
            return
        if not mark.wait(timeout_s):
            self._missed(f"{self.name} does not have all logged values: it does not take them within some seconds")

    def put(self, item: tuple[StepValues, float] | None) -> None:
        if self._failed.is_set() and item is not None:
            return
        if item is not None and self._queue.qsize() >= WAITING:
            if not self._full:
                self._full = True
                log.warning(f"{self.name} is too slow for the logged values, and steps are left out: log less often")
                self._missed(f"{self.name} does not have all logged values: it is too slow for them")
            return
        self._queue.put(item)

    def ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._tracker.open()
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._tracker.log(*item)
            self._tracker.close()
        except (Exception, SystemExit) as error:  # other people's code: whatever it raises, training goes on
            said = (isinstance(error, OSError) and error.strerror) or str(error)
            reason = " ".join(said.split()) or type(error).__name__
            log.warning(f"{self.name} takes no more logged values, and training goes on without it: {reason}")
            self._missed(f"{self.name} does not have all logged values: {reason}")
            self._failed.set()
            self._let_go()

    def _let_go(self) -> None:
        """Nobody waits for what will not be written."""
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(item := self._queue.get_nowait(), threading.Event):
                    item.set()
