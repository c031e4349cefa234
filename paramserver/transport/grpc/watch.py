"""Closes connections to a gRPC server whose callers show no token, before they fill it.

gRPC takes connections by itself. It has a limit for their number, and closes the newest ones beyond it: strangers who
keep many connections open would lock members out. So this process looks at its own sockets when it has many
descriptors, and hangs up the sockets of the excess of strangers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from urllib.parse import unquote

from paramserver.core.crowd import Crowd
from paramserver.transport.addresses import network_of, plain_host
from paramserver.transport.entrance import TOO_MANY
from paramserver.transport.security.access import RefusalLog

# How often this process counts its descriptors.
_LOOK_S = 0.25
# The same while strangers come faster than they go.
_BUSY_S = 0.1
_OPEN = "/proc/self/fd"
# With more names than that, those of callers that have gone are forgotten.
_MOST_KNOWN = 10_000

# Host and port of a caller.
Peer = tuple[str, int]


class Watch:
    """The callers of one server. ``most``: strangers who may be connected at a time."""

    def __init__(self, most: int, refusals: RefusalLog) -> None:
        self.port = 0
        self._most, self._refusals = most, refusals
        # Callers that were admitted, under gRPC's names.
        self._known: dict[str, Peer] = {}
        # Sockets of strangers, by their numbers in the kernel.
        self._crowd = Crowd(most)
        # The callers of all sockets of this process that the last look has seen; None: of other sockets.
        self._seen: dict[int, Peer | None] = {}
        # Descriptors that were open after the last look, without those of strangers.
        self._others = 0

    def known(self, name: str) -> str:
        """A caller has shown who it is. ``name``: gRPC's name for it. Returns its host; empty if it has none."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = _peer(name)
        return found[0]

    async def run(self) -> None:
        """Look again and again."""
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            many = _open_files() > self._others + self._most or len(self._known) > _MOST_KNOWN
            pause_s = _BUSY_S if many and self._look() else _LOOK_S

    def _look(self) -> bool:
        """Hang up the excess of strangers. Returns whether there were any."""
        found = self._sockets()
        present = {peer for _, peer in found.values()}
        self._known = {name: peer for name, peer in self._known.items() if peer in present}
        admitted = set(self._known.values())
        strangers = sorted(inode for inode, (_, peer) in found.items() if peer not in admitted)
        self._crowd.keep(set(strangers))
        out = [
            self._crowd.come(inode, network_of(found[inode][1][0])) for inode in strangers if inode not in self._crowd
        ]
        self._others = _open_files() - len(strangers)
        for inode in filter(None, out):
            fd, (host, _) = found[inode]
            _hang_up(fd, inode)
            self._refusals.say("connection", host, TOO_MANY)
        return any(out)

    def _sockets(self) -> dict[int, tuple[int, Peer]]:
        """The connections to this server: their numbers in the kernel, descriptors and callers."""
        found, seen = {}, {}
        for fd in os.listdir(_OPEN):
            inode = _inode(fd)
            if inode:
                seen[inode] = peer = self._seen[inode] if inode in self._seen else self._caller(int(fd))
                if peer is not None:
                    found[inode] = int(fd), peer
        self._seen = seen
        return found

    def _caller(self, fd: int) -> Peer | None:
        """The caller at the other end of a socket; None: it is no connection to this server."""
        with contextlib.suppress(OSError), _borrowed(fd) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self.port:
                host, port = sock.getpeername()[:2]
                return plain_host(host), port
        return None


def _inode(fd: str) -> int:
    """The number of a socket in the kernel; 0: the descriptor is of no socket, or was closed."""
    with contextlib.suppress(OSError):
        kind, _, number = os.readlink(f"{_OPEN}/{fd}").partition(":[")
        return int(number[:-1]) if kind == "socket" else 0
    return 0


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that a thread of gRPC may close at any time. Raises OSError if there is none."""
    own = os.dup(fd)
    try:
        sock = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with sock:
        yield sock


def _hang_up(fd: int, inode: int) -> None:
    """Hang up this socket, if the descriptor is still that of the socket."""
    with contextlib.suppress(OSError), _borrowed(fd) as sock:
        if os.fstat(sock.fileno()).st_ino == inode:
            sock.shutdown(socket.SHUT_RDWR)


def _open_files() -> int:
    """How many descriptors this process has. Older kernels do not say so in one number."""
    return os.stat(_OPEN).st_size or len(os.listdir(_OPEN))


def _peer(name: str) -> Peer:
    """ "ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5" and the like."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return (plain_host(host.strip("[]")), int(port)) if port.isascii() and port.isdecimal() else ("", 0)
