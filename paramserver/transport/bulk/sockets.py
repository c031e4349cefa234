"""Connected sockets as lines use them: without blocking, plain or with TLS. Any thread may use them."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

# A peer that says nothing for so long is asked for a sign of life, and given up after as much again.
_IDLE_S, _EVERY_S, _TIMES = 10, 5, 2
_UNANSWERED_MS = 20_000
# A receiver that waits is woken when so much has come. TCP tells the sender when bytes are taken from a socket,
# and such a message for each few segments costs more than the segments.
_AT_ONCE_BYTES = 1 << 20
# OpenSSL moves 16 KiB in one call. So many bytes are moved by calls that follow each other at once.
_TLS_BYTES = 256 << 10


class Moving(Protocol):
    """A connected socket. None: nothing can be moved now without waiting."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...

    def receive(self, into: memoryview) -> int | None:
        """How many bytes were received; 0: the peer has hung up. Raises OSError."""
        ...

    def expect(self, nbytes: int) -> None:
        """So much more belongs to what is being received: waiting for less than a good part of it is not worthwhile."""
        ...

    def waiting(self) -> int:
        """How many bytes have come and were not received yet, as far as that is known."""
        ...

    def send(self, pieces: Sequence[memoryview]) -> int | None:
        """How many bytes were sent, of one or more of the pieces. Raises OSError."""
        ...

    def wait(self, events: int, seconds: float) -> bool:
        """Wait until it is ready for ``events`` (POLLIN, POLLOUT), or has failed; False after ``seconds``."""
        ...

    def hang_up(self) -> None:
        """End the connection, whatever other threads do with it; the descriptor stays. May be repeated."""
        ...

    def close(self) -> None:
        """Give the descriptor back. No other thread may use the socket any more. May be repeated."""
        ...


class Plain:
    """Without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._expected = 1

    def fileno(self) -> int:
        """See `Moving`."""
        return self._sock.fileno()

    def receive(self, into: memoryview) -> int | None:
        """See `Moving`."""
        try:
            return self._sock.recv_into(into)
        except BlockingIOError:
            return None

    def expect(self, nbytes: int) -> None:
        """See `Moving`."""
        wanted = max(1, min(nbytes, _AT_ONCE_BYTES))
        if wanted != self._expected:
            self._expected = wanted
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def waiting(self) -> int:
        """See `Moving`."""
        count = array("i", [0])
        fcntl.ioctl(self._sock.fileno(), termios.FIONREAD, count)
        return count[0]

    def send(self, pieces: Sequence[memoryview]) -> int | None:
        """See `Moving`."""
        try:
            return self._sock.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None

    def wait(self, events: int, seconds: float) -> bool:
        """See `Moving`."""
        return _wait(self._sock.fileno(), events, seconds)

    def hang_up(self) -> None:
        """See `Moving`."""
        _break_off(self._sock)

    def close(self) -> None:
        """See `Moving`."""
        self._sock.close()


class Tls:
    """With TLS, after the handshake. OpenSSL lets one thread at a time use a connection."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """See `Moving`."""
        return self._sock.fileno()

    def receive(self, into: memoryview) -> int | None:
        """See `Moving`."""
        got, room = 0, min(len(into), _TLS_BYTES)
        read: Any = self._sock.read  # with memory to read into it returns a count, of which its types do not know
        with self._lock:
            try:
                while got < room and (count := read(room - got, into[got:])):
                    got += count
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return got or None
            except ssl.SSLEOFError:
                pass
        return got

    def expect(self, nbytes: int) -> None:
        """See `Moving`. Nothing is known of the encrypted bytes."""

    def waiting(self) -> int:
        """See `Moving`."""
        return 0

    def send(self, pieces: Sequence[memoryview]) -> int | None:
        """See `Moving`."""
        sent = 0
        with self._lock:
            try:
                for piece in pieces:
                    at = 0
                    while at < len(piece) and sent < _TLS_BYTES:
                        count = self._sock.write(piece[at:])
                        at += count
                        sent += count
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return sent or None
        return sent

    def wait(self, events: int, seconds: float) -> bool:
        """See `Moving`."""
        return _wait(self._sock.fileno(), events, seconds)

    def hang_up(self) -> None:
        """See `Moving`. Without TLS's own farewell, which would have to wait for other threads."""
        _break_off(self._sock)

    def close(self) -> None:
        """See `Moving`."""
        self._sock.close()


def _wait(fd: int, events: int, seconds: float) -> bool:
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(seconds * 1000))


def _break_off(sock: socket.socket) -> None:
    """The peer hears of it at once when the descriptor is closed, even if it reads nothing now."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def tune(sock: socket.socket) -> None:
    """Options of every bulk connection: no delays, and a peer that is cut off is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _EVERY_S),
        ("TCP_KEEPCNT", _TIMES),
        ("TCP_USER_TIMEOUT", _UNANSWERED_MS),
    ):
        if hasattr(socket, name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
