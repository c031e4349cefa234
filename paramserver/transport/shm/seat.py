"""A seat that one process of a host takes, and where the others find it: a lock on a file, and a socket beside it.

The kernel gives the lock back when the process ends, however it ends. A process that connects is handed descriptors. As
in a meeting, only processes of the same user do so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import weakref
from collections.abc import Sequence
from pathlib import Path

from paramserver.transport.shm.meeting import check_peer, host, place

_PREFIX = "paramserver-host-"
_LOCK = ".lock"
_NAME = re.compile(_PREFIX + "[0-9a-f]{24}")
# Processes of a host that may be about to connect.
_WAITING = 64
_BYTE = b"\n"


def seat_name(*facts: object) -> str:
    """The name of the seat of this host for these facts. Nobody finds the name who does not know all of them."""
    text = "\0".join([host(), *(str(fact) for fact in facts)])
    return _PREFIX + hashlib.sha256(text.encode()).hexdigest()[:24]


def host_word(*facts: object) -> str:
    """A word that is equal for processes which meet on one host in one directory, and know the same facts.

    Empty if there is no such directory.
    """
    try:
        where = os.stat(place())
    except OSError:
        return ""
    text = "\0".join([host(), str(where.st_dev), str(where.st_ino), *(str(fact) for fact in facts)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Seat:
    """The seat, taken by this process. Made by `take`; leave it with `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        """Takes ``lock`` over. Raises OSError if nobody can connect here."""
        self._path, self._lock = path, lock
        # Connections to processes that have come.
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        _seats.add(self)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):  # of a process that was killed
                path.unlink()
            self.socket.bind(str(path))
            path.chmod(0o600)
            self.socket.listen(_WAITING)
        except BaseException:
            self.close()
            raise

    def welcome(self, fds: Sequence[int]) -> socket.socket | None:
        """The connection to a process that has come, which is handed ``fds``; None if there is none of the same user.

        Raises OSError if it cannot be handed over.
        """
        try:
            connection, _ = self.socket.accept()
        except BlockingIOError:
            return None
        try:
            connection.setblocking(False)
            check_peer(connection)
            socket.send_fds(connection, [_BYTE], list(fds))
        except PermissionError:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        self._connections.add(connection)
        return connection

    def forked(self) -> None:
        """In a child of this process: the seat, and the connections, are the parent's alone."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)
        for sock in (self.socket, *self._connections):
            sock.close()

    def close(self) -> None:
        """Let another process have the seat. May be repeated."""
        self.socket.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            for path in (self._path, lock_of(self._path)):
                with contextlib.suppress(OSError):
                    path.unlink()
            os.close(lock)

    def __del__(self) -> None:
        if hasattr(self, "socket"):
            self.close()


_seats: weakref.WeakSet[Seat] = weakref.WeakSet()


def _in_child() -> None:
    for seat in list(_seats):
        seat.forked()


# A DataLoader's processes may outlive a worker that is killed.
os.register_at_fork(after_in_child=_in_child)


def take(name: str, folder: Path | None = None) -> Seat | None:
    """The seat of that name; None if another process has it (see `meeting.connected`). Raises OSError."""
    folder = folder or place()
    path = folder / name
    _sweep(folder, but=name)
    lock = _locked(lock_of(path))
    return Seat(path, lock) if lock is not None else None


def lock_of(path: Path) -> Path:
    """The file with the lock of a seat."""
    return path.with_name(path.name + _LOCK)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock on a file; None if another process holds it. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return fd
        os.close(fd)  # its former holder has removed the file meanwhile


def _sweep(folder: Path, but: str) -> None:
    """Remove what processes of this user have left that were killed, if ``folder`` can be listed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            name = entry.name.removesuffix(_LOCK)
            if entry.name != name and name != but and _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        lock = _locked(Path(entry.path))
                        if lock is not None:
                            for path in (folder / name, Path(entry.path)):
                                with contextlib.suppress(FileNotFoundError):
                                    path.unlink()
                            os.close(lock)
