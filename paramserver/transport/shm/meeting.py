"""How two processes of one host hand each other their memory: over a socket that is there for a moment.

One process opens a `Meeting` and tells the meeting's name over the authenticated channel; the other process pays a
`Visit`. A visit succeeds only on the same host, or between containers that share /dev/shm. Nothing here waits: the
visitor leaves its descriptor before it answers, and finds the other's descriptor when it next hears of that process.

(Memory cannot have the name itself: the kernel gives a file without a name one only once, and no other after that is
removed; with a name that stays, memory would outlive a process that is killed.)
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
_PREFIX = "paramserver-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
# No meeting lasts so long: an older one was left behind by a process that was killed.
_STALE_S = 60.0
_BYTE = b"\n"


class Meeting:
    """A place to meet one other process of the same user. Close it."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises OSError where there can be none."""
        folder = folder or FOLDER
        sweep(folder)
        self.name = _PREFIX + secrets.token_hex(16)
        self._path = folder / self.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(str(self._path))
            self._path.chmod(0o600)
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise

    def swap(self, fd: int, take: int = 1) -> list[int]:
        """Hand over a descriptor to the visitor, and ``take`` so many of its own. Raises OSError without a visitor."""
        connection, _ = self._socket.accept()
        with connection:
            connection.setblocking(False)
            theirs = _receive(connection, take)
            socket.send_fds(connection, [_BYTE], [fd])
        return theirs

    def close(self) -> None:
        """End the meeting: no visitor can come any more. May be repeated."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class Visit:
    """The other side of a meeting."""

    def __init__(self, name: str, *fds: int, folder: Path | None = None) -> None:
        """Come to the meeting ``name`` and leave descriptors there.

        Raises OSError if it cannot be reached, ValueError if ``name`` is none.
        """
        if not _NAME.fullmatch(name):
            raise ValueError("that is no name of a meeting")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(str((folder or FOLDER) / name))
            _check_peer(self._socket)
            socket.send_fds(self._socket, [_BYTE], fds)
        except BaseException:
            self._socket.close()
            raise

    def take(self) -> int:
        """The descriptor that the other process has left. Raises OSError if there is none. Ends the visit."""
        try:
            return _receive(self._socket, 1)[0]
        finally:
            self._socket.close()

    def close(self) -> None:
        """Leave without taking anything. May be repeated."""
        self._socket.close()


def sweep(folder: Path) -> None:
    """Remove meetings of this user whose process was killed in the middle of one."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    ours = stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.geteuid()
                    if ours and time.time() - facts.st_ctime > _STALE_S:
                        os.unlink(entry.path)


def _receive(connection: socket.socket, count: int) -> list[int]:
    _check_peer(connection)
    _, fds, _, _ = socket.recv_fds(connection, 1, count)
    if len(fds) < count:
        for fd in fds:
            os.close(fd)
        raise ConnectionAbortedError("the other process left without handing everything over")
    for fd in fds:
        os.set_inheritable(fd, False)
    return list(fds)


def _check_peer(connection: socket.socket) -> None:
    """Only processes of the same user share memory."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError("the other process belongs to another user")
