"""Standard input of a command: each worker reads all of it from the beginning, also a worker that is started again."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping

from paramserver.processes import environment as env

_BYTES = 64 << 10


class Input:
    """What this process has as standard input. ``say`` prints a line for people; any thread may call it.

    A file is opened once more for each worker. What comes from a pipe is kept in a file without a name, and goes to
    each worker through a pipe of its own. What a person types cannot be shared: reading fails in the script.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._pipe: _Kept | None = None
        self._at: int | None = None
        # For the environment of workers.
        self.variables: Mapping[str, str] = {}
        try:
            kind = os.fstat(0).st_mode
        except OSError:  # it is closed
            return
        if os.isatty(0):
            self.variables = {env.ENV_TERMINAL: "1"}
        elif stat.S_ISREG(kind):
            self._at = os.lseek(0, 0, os.SEEK_CUR)
        elif not stat.S_ISCHR(kind):
            self._pipe = _Kept(say)

    @contextlib.contextmanager
    def opened(self, worker: bool = True) -> Iterator[int | None]:
        """A descriptor for a process that is started meanwhile; None: nothing is there for it to read."""
        stdin = self._open() if worker else None
        try:
            yield stdin
        finally:
            if stdin is not None:
                os.close(stdin)

    def _open(self) -> int | None:
        if self._pipe is not None:
            return self._pipe.open()
        if self._at is None:
            return None
        file = os.open("/dev/fd/0", os.O_RDONLY)
        os.lseek(file, self._at, os.SEEK_SET)
        return file


class _Kept:
    """The bytes that have come through standard input so far. A thread reads them, further threads hand them on."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._file, name = tempfile.mkstemp()
        os.unlink(name)
        self._size = 0
        self._over = False
        self._more = threading.Condition()
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def open(self) -> int:
        """A pipe through which all bytes come."""
        reading, writing = os.pipe()
        threading.Thread(target=self._feed, args=(writing,), name="input", daemon=True).start()
        return reading

    def _read(self) -> None:
        try:
            while data := os.read(0, _BYTES):
                while data:
                    count = os.write(self._file, data)
                    data = data[count:]
                    with self._more:
                        self._size += count
                        self._more.notify_all()
        except OSError as error:  # workers must not take the part for the whole
            self._say(f"standard input cannot be kept for the workers ({error.strerror}): the run ends")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        with self._more:
            self._over = True
            self._more.notify_all()
        if self._size:
            self._say(f"standard input is at its end: each worker reads its {self._size} bytes")

    def _feed(self, pipe: int) -> None:
        at = 0
        with contextlib.suppress(BrokenPipeError):  # the worker has ended
            while data := self._after(at):
                at += os.write(pipe, data)
        os.close(pipe)

    def _after(self, at: int) -> bytes:
        """Bytes from this place on; none: there are no more."""
        with self._more:
            self._more.wait_for(lambda: self._size > at or self._over)
        return os.pread(self._file, _BYTES, at)
