"""One bulk connection at one of its ends: records go out and come in. Threads move the bytes, an event loop decides.

Small records are moved by the loop itself, since another thread would cost more than it gains. A thread waits
for a peer for `_PATIENCE_S`, and up to `_PATIENT` times in a row while no other work needs a thread. Then the loop
watches the socket. So a slow peer costs no thread.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable

from paramserver import errors
from paramserver.transport.base import Place
from paramserver.transport.bulk.movers import movers
from paramserver.transport.bulk.reading import Reader
from paramserver.transport.bulk.records import Record
from paramserver.transport.bulk.sockets import Moving

# Bytes that wait here to be sent before their sender has to wait. They lie in the sender's memory.
_ROOM_OUT_BYTES = 16 << 20
# A sender that waits goes on when no more than this is left: then it makes several records at a time.
_LOW_BYTES = _ROOM_OUT_BYTES // 2
# Nothing more is received while more bytes than this wait here to be taken: two frames with the largest chunks, so that
# the second one is received while the first one is taken. They may lie in memory of their own.
_ROOM_IN_BYTES = 16 << 20
# More than that is moved by a thread.
_SMALL_BYTES = 64 << 10
# One thread sends or receives so much before others get a turn, if they wait for one.
_TURN_BYTES = 16 << 20
# How long a thread waits for a peer at a time, and how often in a row while no other work needs a thread.
_PATIENCE_S, _PATIENT = 0.01, 5
# If nothing more of a record comes for so long, its sender is given up.
_STALL_S = 20.0
# How often a line from which nothing is received is looked at.
_LOOK_S = 0.25
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_PIECES = 64


class LostError(errors.UnavailableError):
    """The connection is gone. The text is the reason."""


class Line:
    """See above. Belongs to the loop that makes it."""

    def __init__(self, sock: Moving) -> None:
        self._sock, self._loop, self._movers = sock, asyncio.get_running_loop(), movers()
        self._changed = asyncio.Event()
        # The reason why the line is gone; None: it is not.
        self._lost: LostError | None = None
        # Threads that use the socket.
        self._busy = 0
        # Outgoing: pieces that wait, pieces of which a part may be sent, bytes that were ever given to be sent, and
        # bytes of them that were sent. One sends at a time: the loop, or a thread. Only that one changes the second
        # and the last.
        self._going: deque[memoryview] = deque()
        self._leaving: list[memoryview] = []
        self._given_bytes = self._sent_bytes = 0
        self._sending = False
        # Incoming: records that wait, bytes of records that ever came, and bytes of records that were taken. One
        # receives at a time: the loop, or a thread. Only that one adds to the first two.
        self._reader = Reader(sock)
        self._come: deque[Record] = deque()
        self._came_bytes = self._taken_bytes = 0
        self._receiving = self._paused = False
        self._watch: asyncio.TimerHandle | None = None
        self._listen()
        # What TLS has taken from the socket already does not make the socket readable.
        self._loop.call_soon(self._receive)

    @property
    def gone(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._lost is not None

    @property
    def busy(self) -> bool:
        """Whether a thread uses the socket."""
        return self._busy > 0

    @property
    def _going_bytes(self) -> int:
        """Bytes that are still to be sent."""
        return self._given_bytes - self._sent_bytes

    @property
    def _full(self) -> bool:
        """Whether nothing more is received until some of it is taken."""
        return self._came_bytes - self._taken_bytes > _ROOM_IN_BYTES

    @property
    def heard(self) -> bool:
        """Whether a record has ever come."""
        return self._came_bytes > 0

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way here, so that another call may begin."""
        return not (self.gone or self._going_bytes or self._come or self._reader.amid)

    @property
    def place(self) -> Place | None:
        """Where the data of incoming frames is received; None: in memory of its own."""
        return self._reader.place

    @place.setter
    def place(self, place: Place | None) -> None:
        self._reader.place = place

    # ---- for the users of the line

    async def send(self, *records: Record) -> bool:
        """Send records. Waits while much is under way. False: a record has come meanwhile. Raises LostError."""
        if self._lost is not None:
            raise self._lost
        for record in records:
            self._given_bytes += record.nbytes
            self._going.append(memoryview(record.head()))
            self._going.extend(record.pieces)
        if not self._sending:
            self._send()
        while self._going_bytes > _ROOM_OUT_BYTES and not self._come:
            if self._lost is not None:
                raise self._lost
            await self._change()
        return not self._come

    async def receive(self) -> Record:
        """The next record. Raises LostError when there are no more."""
        while not self._come:
            if self._lost is not None:
                raise self._lost
            await self._change()
        record = self._come.popleft()
        self._taken_bytes += record.nbytes
        if self._paused and not self.gone and not self._full:
            self._paused = False
            self._listen()
            self._receive()
        return record

    async def ended(self) -> LostError:
        """Wait until the line is gone; the reason."""
        while self._lost is None:
            await self._change()
        return self._lost

    def close(self, reason: str = "this end has closed the connection") -> None:
        """Hang up at once. What is under way is lost. May be repeated."""
        if self._lost is not None:
            return
        self._lost = LostError(reason)
        self._sock.hang_up()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self._watch is not None:
            self._watch.cancel()
        self._changed.set()
        self._release()

    # ---- outgoing

    def _send(self) -> None:
        """Send what waits: now if that is little, else in a thread."""
        self._sending = True
        if self._going_bytes > _SMALL_BYTES:
            self._in_thread(self._move_out)
            return
        try:
            self._sent(self._send_some(self._sent_bytes + _TURN_BYTES))
        except (OSError, ValueError) as error:
            self.close(_words(error))

    def _sent(self, done: bool) -> None:
        """Something was sent. ``done``: all that waited then."""
        self._changed.set()
        if self.gone:
            return
        if not done:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        elif self._going:
            self._send()
        else:
            self._sending = False

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        self._send()

    def _send_some(self, until: int) -> bool:
        """Send as much as the socket takes, until so many bytes were ever sent; True if nothing is left."""
        while not self.gone and self._sent_bytes < until:
            while self._going and len(self._leaving) < _PIECES:
                self._leaving.append(self._going.popleft())
            if not self._leaving:
                return True
            sent = self._sock.send(self._leaving)
            if sent is None:
                return False
            before = self._going_bytes
            self._sent_bytes += sent
            if before > _LOW_BYTES >= self._going_bytes:
                self._loop.call_soon_threadsafe(self._changed.set)
            done = 0
            while done < len(self._leaving) and sent >= len(self._leaving[done]):
                sent -= len(self._leaving[done])
                done += 1
            del self._leaving[:done]
            if sent:
                self._leaving[0] = self._leaving[0][sent:]
        return False

    def _move_out(self) -> None:
        """In a thread. What is given meanwhile is sent, too."""
        error, done, until = "", False, self._sent_bytes + _TURN_BYTES
        try:
            while not (done := self._send_some(until)) and not self.gone:
                if self._sent_bytes < until:
                    if not self._wait(select.POLLOUT):
                        break
                elif self._movers.wanted:
                    break
                else:
                    until = self._sent_bytes + _TURN_BYTES
        except RuntimeError:
            pass  # the loop is closed
        except (OSError, ValueError) as failure:
            error = _words(failure)
        self._tell(error, lambda: self._sent(done))

    # ---- incoming

    def _listen(self) -> None:
        self._receiving = False
        self._loop.add_reader(self._sock.fileno(), self._receive)

    def _receive(self) -> None:
        """Something can be received, probably: receive it now if it is little, else in a thread."""
        if self._receiving or self.gone:
            return
        try:
            while not self._full and (record := self._reader.next(_SMALL_BYTES)) is not None:
                self._came(record)
                self._changed.set()
        except (OSError, ValueError, errors.ProtocolError) as error:
            self.close(_words(error))
            return
        if self._reader.hung_up:
            self.close("it stopped or closed the connection")
        elif self._full:
            self._pause()
        elif self._reader.amid:
            self._expect()
            if self._reader.left_bytes >= _SMALL_BYTES:
                self._loop.remove_reader(self._sock.fileno())
                self._receiving = True
                self._in_thread(self._move_in)

    def _pause(self) -> None:
        self._paused = True
        self._loop.remove_reader(self._sock.fileno())
        self._still_there()

    def _still_there(self) -> None:
        """While nothing is received: look now and then whether the peer has hung up."""
        if self._paused and not self.gone:
            if self._sock.wait(_HUNG_UP, 0.0):
                self.close("it stopped or closed the connection")
            else:
                self._loop.call_later(_LOOK_S, self._still_there)

    def _came(self, record: Record) -> bool:
        """A record has come. Returns whether no other one waited: then the loop may wait for this one."""
        self._came_bytes += record.nbytes
        self._come.append(record)
        return len(self._come) == 1

    def _move_in(self) -> None:
        """In a thread. The loop takes what has come meanwhile."""
        error, idle, until = "", False, self._came_bytes + _TURN_BYTES
        try:
            while not (self._full or self.gone or (self._came_bytes >= until and self._movers.wanted)):
                record = self._reader.next()
                if record is not None:
                    if self._came(record):
                        self._loop.call_soon_threadsafe(self._changed.set)
                elif self._reader.hung_up:
                    break
                elif not self._wait(select.POLLIN):
                    idle = True
                    break
        except RuntimeError:
            return  # the loop is closed
        except (OSError, ValueError, errors.ProtocolError) as failure:
            error = _words(failure)
        self._tell(error, lambda: self._received(idle))

    def _received(self, idle: bool) -> None:
        """A thread has received what it could. ``idle``: too little came to wait for it in a thread."""
        if self.gone:
            return
        self._listen()
        if not idle:
            self._receive()
        elif self._reader.amid:
            self._expect()

    def _expect(self) -> None:
        """The rest of a record has to come."""
        if self._watch is None:
            self._watch = self._loop.call_later(_STALL_S, self._look, self._reader.received + self._sock.waiting())

    def _look(self, before: int) -> None:
        self._watch = None
        if self._reader.amid and not self._paused:
            if self._reader.received + self._sock.waiting() == before:
                self.close(f"nothing more of a record has come for {_STALL_S:g} s")
            else:
                self._expect()

    # ---- threads

    def _in_thread(self, work: Callable[[], None]) -> None:
        self._busy += 1
        self._movers.do(work)

    def _wait(self, events: int) -> bool:
        """In a thread: wait until the socket is ready; False: it is not, and the loop has to watch it."""
        for _ in range(_PATIENT):
            if self._sock.wait(events, _PATIENCE_S):
                return True
            if self._movers.wanted or self.gone:
                break
        return False

    def _tell(self, error: str, then: Callable[[], None]) -> None:
        """In a thread: what the loop has to do now that the thread is through."""

        def told() -> None:
            self._busy -= 1
            if error:
                self.close(error)
            then()
            self._release()

        try:
            self._loop.call_soon_threadsafe(told)
        except RuntimeError:  # the loop is closed
            self._sock.hang_up()

    async def released(self) -> None:
        """After :meth:`close`: wait until no thread uses the socket any more, which takes milliseconds.

        A task that is cancelled meanwhile waits, too, since until then a thread may still write to memory of the task.
        """
        cancelled: asyncio.CancelledError | None = None
        while self._busy:
            try:
                await self._change()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _release(self) -> None:
        """Give the descriptor back if nobody uses it any more."""
        if self.gone and not self._busy:
            self._sock.close()
            self._going.clear()
            self._leaving.clear()
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _words(error: BaseException) -> str:
    """The reason of a failed socket, as a part of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
