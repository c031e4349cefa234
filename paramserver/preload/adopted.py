"""A process that the preloaded process has forked, and whose parent is this process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER = 36


class Adopter:
    """Makes orphans among this process's descendants its children, as long as somebody forks. One per process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._users = 0

    @contextlib.contextmanager
    def adopting(self) -> Iterator[None]:
        """Inside, a process whose parent ends becomes a child of this process. Raises OSError."""
        if self._users == 0:
            self._set(1)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._set(0)

    def _set(self, value: int) -> None:
        if self._libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class Adopted:
    """A child process that this process has not started itself. Needs a running event loop. Raises OSError."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_end)

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; below 0, a signal has ended it. None while it runs."""
        return self._code

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        await self._ended.wait()
        assert self._code is not None
        return self._code

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        _, status = os.waitpid(self._pid, 0)
        self._code = os.waitstatus_to_exitcode(status)
        self._ended.set()
