"""An event loop in a thread of its own, with a blocking face for the training loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from paramserver import errors

T = TypeVar("T")
# Idle threads end at once. A thread that hangs in a call, for example to storage, is left behind after so long.
_THREADS_S = 2.0


class Background:
    """Runs coroutines for code that blocks. :meth:`close` ends the loop and its thread."""

    def __init__(self, name: str = "paramserver") -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        # Of `asyncio.to_thread`.
        self._threads = concurrent.futures.ThreadPoolExecutor(thread_name_prefix=name)
        self.loop.set_default_executor(self._threads)
        started = threading.Event()

        def main() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.call_soon(started.set)
            self.loop.run_forever()

        self._thread = threading.Thread(target=main, name=name, daemon=True)
        self._thread.start()
        started.wait()

    @property
    def elsewhere(self) -> bool:
        """Whether this is a process that was forked from the one that has the loop."""
        return os.getpid() != self._pid

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; any thread may wait for its result. Raises JobFailedError after :meth:`close`.

        Raises UserError in a process that was forked from this one.
        """
        if self.elsewhere:  # the thread of the loop is not here: nobody would end the wait
            work.close()
            raise errors.UserError(
                f"this process {os.getpid()} was forked from {self._pid}, and is no member of the job: call ctx, "
                f"or the client, in process {self._pid} only"
            )
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise errors.JobFailedError("this process has left the job already") from error

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for it. Raises DeadlineError after ``timeout_s``; Ctrl-C cancels it."""
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise errors.DeadlineError(f"gave up after {timeout_s:g} s") from error
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, stop the loop, end its threads."""
        if self.loop.is_closed() or self.elsewhere:
            return

        async def cancel_all() -> None:
            this = asyncio.current_task()
            # Tasks that end, and other threads, may begin further tasks meanwhile.
            while tasks := [task for task in asyncio.all_tasks() if task is not this]:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel_all(), 10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        ending = threading.Thread(target=self._threads.shutdown, daemon=True)
        ending.start()
        ending.join(_THREADS_S)
        if not self._thread.is_alive():
            self.loop.close()
