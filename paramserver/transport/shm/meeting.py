"""How two processes of one host hand each other their memory: over a socket that is there for a moment.

One process opens a `Meeting` and tells the meeting's name over the authenticated channel; the other process pays a
`Visit`. A visit succeeds only on the same host, where both processes see the same directory: /dev/shm, or a volume
that containers have in common (`meet_in`). Nothing here waits: the visitor leaves its descriptor before it answers, and
finds the other's descriptor when it next hears of that process.

A name is a secret between the two processes. In a directory that its users cannot list, such as the volume of our
containers, no third process finds a meeting, not even one of the same user.

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
from functools import cache
from pathlib import Path

FOLDER = Path("/dev/shm")
_PREFIX = "paramserver-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
# No meeting lasts so long: an older one was left behind by a process that was killed.
_STALE_S = 60.0
_BYTE = b"\n"


class _Place:
    """Where this process meets others."""

    folder = FOLDER


def meet_in(folder: Path) -> None:
    """From now on this process meets others in ``folder``. It holds sockets only; a path of up to 62 bytes."""
    _Place.folder = folder


def place() -> Path:
    """The directory in which this process meets others."""
    return _Place.folder


@cache
def host() -> str:
    """A word that only this host has: the number of its kernel's present start. Empty: not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def unseen(their_host: str) -> str:
    """In words for the other process, why its meeting is not found here. ``their_host``: what `host` says there."""
    apart = f"in a container that has no directory in common with this one (cluster.meeting_dir, there {_Place.folder})"
    if not their_host or not host():
        return f"it is on another host, or {apart}"
    return f"it is on this host, but {apart}" if their_host == host() else "it is on another host"


def refused(error: OSError | ValueError) -> str:
    """In words for the other process, why its meeting could not be visited."""
    if isinstance(error, PermissionError):
        return f"it runs as another user, or may not enter {_Place.folder}"
    return f"no memory can be shared with it: {error}"


class Meeting:
    """A place to meet one other process of the same user. Close it."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises OSError where there can be none."""
        folder = folder or _Place.folder
        sweep(folder)
        self.name = _PREFIX + secrets.token_hex(16)
        self._path = folder / self.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(str(self._path))
            self._path.chmod(0o600)
            self._socket.listen(1)
        except OSError as error:
            self.close()
            raise OSError(f"{folder} cannot be used (cluster.meeting_dir): {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def swap(self, fd: int, take: int = 1) -> list[int]:
        """Hand over a descriptor to the visitor, and ``take`` so many of its own. Raises OSError without a visitor."""
        connection, _ = self._socket.accept()
        with connection:
            connection.setblocking(False)
            theirs = receive(connection, take)
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
        self._socket = connected(name, folder)
        try:
            socket.send_fds(self._socket, [_BYTE], fds)
        except BaseException:
            self._socket.close()
            raise

    def take(self) -> int:
        """The descriptor that the other process has left. Raises OSError if there is none. Ends the visit."""
        try:
            return receive(self._socket, 1)[0]
        finally:
            self._socket.close()

    def close(self) -> None:
        """Leave without taking anything. May be repeated."""
        self._socket.close()


def sweep(folder: Path) -> None:
    """Remove meetings of this user whose process was killed in the middle of one, if ``folder`` can be listed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    ours = stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.geteuid()
                    if ours and time.time() - facts.st_ctime > _STALE_S:
                        os.unlink(entry.path)


def connected(name: str, folder: Path | None = None) -> socket.socket:
    """A connection to the process that listens under ``name``. Raises OSError if there is none, or of another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.connect(str((folder or _Place.folder) / name))
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, count: int) -> list[int]:
    """Descriptors that have come. Raises OSError if that are fewer, or from a process of another user."""
    check_peer(connection)
    _, fds, _, _ = socket.recv_fds(connection, 1, count)
    if len(fds) < count:
        for fd in fds:
            os.close(fd)
        raise ConnectionAbortedError("the other process left without handing everything over")
    for fd in fds:
        os.set_inheritable(fd, False)
    return list(fds)


def check_peer(connection: socket.socket) -> None:
    """Only processes of the same user share memory."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid() or uid == _anybody():
        raise PermissionError("the other process belongs to another user")


@cache
def _anybody() -> int | None:
    """The number of all users whom this process's user namespace does not know; None: it knows all."""
    try:
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
        return None if whole else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
