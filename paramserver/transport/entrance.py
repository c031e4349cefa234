"""Takes connections at those ports of this process that are not gRPC's, and keeps strangers from filling them.

A connection is a stranger's until its caller has shown a token. The excess of strangers gives way (`core/crowd.py`).
When the process has few descriptors left, strangers give way, too: the last descriptors are for files of the job.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable

from paramserver.core.crowd import Crowd
from paramserver.transport.addresses import network_of
from paramserver.transport.limits import STRANGERS, reserve, strangers, usable_files
from paramserver.transport.security.access import RefusalLog

# Nothing is accepted for so long when a connection could not be accepted.
_PAUSE_S = 0.5
_AT_ONCE = 64
TOO_MANY = "too many connections without a token: this one gave way"
NO_FILES = "few file descriptors are left (ulimit -n): this connection gave way"

# Ends a connection.
End = Callable[[], object]


class Entrance:
    """``take`` gets a connected socket, which is its own then, the host at its other end, and a number.

    ``take`` returns a function that ends the connection at once. It calls :meth:`settled` with the number when the
    caller has shown who it is, or when the connection has ended. Belongs to the loop that makes it.
    """

    def __init__(self, what: str, take: Callable[[socket.socket, str, int], End], most: int = STRANGERS) -> None:
        """``what``: the kind of connections, for the log. ``most``: strangers at a time."""
        self._what, self._take = what, take
        self._loop = asyncio.get_running_loop()
        self._refusals = RefusalLog()
        self._crowd = Crowd(min(most, strangers()))
        self._strangers: dict[int, tuple[End, str]] = {}
        self._numbers = itertools.count()
        self._listening: list[socket.socket] = []

    def open(self, listening: socket.socket) -> None:
        """Take the connections of a socket that listens, and does not block. The socket stays the caller's."""
        self._listening.append(listening)
        self._loop.add_reader(listening.fileno(), self._come, listening)

    def close(self) -> None:
        """Take no more connections."""
        listening, self._listening = self._listening, []
        for sock in listening:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())

    def settled(self, number: int) -> None:
        """The caller has shown who it is, or the connection has ended. May be repeated."""
        self._strangers.pop(number, None)
        self._crowd.gone(number)

    def refuse(self, host: str, reason: str) -> None:
        """Log that a connection is closed; repeated lines are counted."""
        self._refusals.say(self._what, host, reason)

    def _come(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or no memory is left; the port stays readable
                self._give_way(NO_FILES)
                self._pause(listening)
                return
            host = str(peer[0])
            if sock.fileno() >= usable_files() - reserve() and not self._give_way(NO_FILES):
                self.refuse(host, NO_FILES)
                sock.close()
                continue
            number = next(self._numbers)
            out = self._crowd.come(number, network_of(host))
            if out == number:
                self.refuse(host, TOO_MANY)
                sock.close()
                continue
            if out is not None:
                self._turn_out(out, TOO_MANY)
            self._strangers[number] = self._take(sock, host, number), host

    def _pause(self, listening: socket.socket) -> None:
        self._loop.remove_reader(listening.fileno())

        def again() -> None:
            if listening in self._listening:
                self._loop.add_reader(listening.fileno(), self._come, listening)

        self._loop.call_later(_PAUSE_S, again)

    def _give_way(self, reason: str) -> bool:
        """End one stranger's connection; False: there is none."""
        out = self._crowd.oldest()
        if out is None:
            return False
        self._turn_out(out, reason)
        return True

    def _turn_out(self, number: int, reason: str) -> None:
        end, host = self._strangers.pop(number)
        self.refuse(host, reason)
        end()
