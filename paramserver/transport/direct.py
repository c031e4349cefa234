"""Calls over a socket within a host by the thread that waits for them, without a loop: no other thread has to wake up.

The other end is a `shm.channel.LocalServer`, as it is for a `LocalChannel`. Only the case in which all goes well is
here. A call that fails is made again by the caller over the channel, which has the words and the attempts.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from google.protobuf.message import Message

from paramserver import errors
from paramserver.transport.base import Method, MethodKind, find
from paramserver.transport.envelopes import pack, unpack
from paramserver.v1.local_pb2 import Envelope

_PIECE_BYTES = 64 << 10
# A thread that waits on a socket that is shut down returns at once.
_CLOSE_S = 1.0


class DirectLine:
    """One end of a connected socket, which it takes over. One thread at a time asks; any may close it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.gone = False
        self._sock = sock
        weakref.finalize(self, sock.close)  # dropping the last reference hangs up
        self._numbers = itertools.count(1)
        self._come = bytearray()
        self.lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._sock.fileno()

    def begin(self, method: Method, request: bytes) -> int:
        """Send a call; its number."""
        number = next(self._numbers)
        self._send(Envelope(call=number, method=method.name, message=request))
        return number

    def cancel(self, number: int) -> None:
        """Give a call up."""
        self._send(Envelope(call=number, cancel=True))

    def _send(self, envelope: Envelope) -> None:
        raw = pack(envelope)
        try:
            sent = self._sock.send(raw)
        except OSError:  # BlockingIOError, too: the other end has not read for long
            sent = 0
        self.gone = self.gone or sent < len(raw)

    def take(self, number: int) -> bytes | None:
        """The answer to a call if it has come. Raises what the call has failed with, UnavailableError if cut off."""
        try:
            piece = self._sock.recv(_PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        self.gone = self.gone or not piece
        self._come += piece
        for envelope in unpack(self._come):
            if envelope.call != number:  # the answer to a call that was given up
                continue
            if envelope.error:
                raise errors.ParamServerError(envelope.text)
            if envelope.HasField("message"):
                return envelope.message
        if self.gone:
            raise errors.UnavailableError("the other process is gone")
        return None

    def close(self) -> None:
        """Hang up. A thread that waits here hears of it. May be repeated."""
        self.gone = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self.lock.acquire(timeout=_CLOSE_S):
            self.lock.release()
        self._sock.close()


def ask_all(
    lines: Sequence[DirectLine],
    method: str,
    requests: Sequence[Message],
    timeout_s: float,
    sent: Callable[[], None] | None = None,
) -> list[Message] | None:
    """Make one unary call on each line and wait for all answers; None if one fails, or ``timeout_s`` pass.

    ``sent`` is called when all requests have left.
    """
    found = find(method, MethodKind.UNARY)
    raw = [found.encode_request(request) for request in requests]
    with ExitStack() as alone:
        for line in lines:
            alone.enter_context(line.lock)
        if any(line.gone for line in lines):
            return None
        calls = {line.fileno(): (line, line.begin(found, request)) for line, request in zip(lines, raw, strict=True)}
        if sent is not None:
            sent()
        answers: dict[int, bytes] = {}
        try:
            answers = _answers(calls, time.monotonic() + timeout_s)
        finally:
            for fd, (line, number) in calls.items():
                if fd not in answers and not line.gone:
                    line.cancel(number)
        if len(answers) < len(calls):
            return None
        return [found.decode_response(answers[line.fileno()]) for line in lines]


def _answers(calls: Mapping[int, tuple[DirectLine, int]], deadline: float) -> dict[int, bytes]:
    """By descriptor, the answers that have come when all are there, one has failed, or the time is over."""
    answers: dict[int, bytes] = {}
    poll = select.poll()
    for fd in calls:
        poll.register(fd, select.POLLIN)
    while len(answers) < len(calls) and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            line, number = calls[fd]
            try:
                answer = line.take(number)
            except errors.ParamServerError:
                return answers
            if answer is not None:
                answers[fd] = answer
                poll.unregister(fd)
    return answers
