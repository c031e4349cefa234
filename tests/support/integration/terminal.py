"""A command under a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.support.integration.harness import Place, until


class Terminal:
    """A command of paramserver under a pseudo-terminal of 120 columns."""

    def __init__(self, place: Place, tokens: list[str | Path]) -> None:
        self._ours, self._theirs = pty.openpty()
        theirs = self._theirs
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        os.set_blocking(self._ours, False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paramserver", *map(str, tokens)],
            env={**place.environ(), "TERM": "xterm-256color"},
            cwd=place.work,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self._raw = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10.0)
        os.close(self._ours)
        os.close(self._theirs)

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._ours, keys.encode())

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, as it does unless a program has changed that."""
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)

    @property
    def text(self) -> str:
        """Everything that was ever written, without what steers the terminal."""
        while True:
            try:
                data = os.read(self._ours, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._raw += data
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._raw.decode(errors="replace"))

    def wait_for(self, pattern: str, deadline_s: float = 60.0) -> None:
        with contextlib.suppress(AssertionError):
            until(pattern, lambda: re.search(pattern, self.text), deadline_s)
            return
        raise AssertionError(f"never saw {pattern!r} in\n{self.text}")

    def wait(self, deadline_s: float = 60.0) -> int:
        """The exit code; what is written meanwhile is read, or else the command would wait for us."""
        deadline = time.monotonic() + deadline_s
        while (code := self._process.poll()) is None:
            assert time.monotonic() < deadline, self.text
            assert self.text is not None
            time.sleep(0.02)
        return code
