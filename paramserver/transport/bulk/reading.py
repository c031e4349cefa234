"""Puts records together out of the bytes that come. Data goes straight into its place, or into memory of its own."""

from __future__ import annotations

from paramserver import errors
from paramserver.transport.base import Place
from paramserver.transport.bulk.records import HEAD_BYTES, Head, Kind, Record, parse
from paramserver.transport.bulk.sockets import Moving

_ALIGNMENT = 64
# Smaller data needs no memory of a special kind.
_SMALL_BYTES = 4096


class Reader:
    """The records that come over one socket. Used by one thread at a time."""

    def __init__(self, sock: Moving, hello: bool = False) -> None:
        """``hello``: nothing but a token may come."""
        self._sock, self._hello = sock, hello
        self._head_room = bytearray(HEAD_BYTES)
        self._head: Head | None = None
        self._header = bytearray()
        self._data = memoryview(b"")
        # Where the data of frames is received; None: in memory of its own.
        self.place: Place | None = None
        # The part of the head, the header or the data that is still to come.
        self._left = memoryview(self._head_room)
        # Bytes that have come so far.
        self.received = 0
        self.hung_up = False

    @property
    def amid(self) -> bool:
        """Whether a part of a record has come, but not all of it."""
        return self._head is not None or len(self._left) < HEAD_BYTES

    @property
    def left_bytes(self) -> int:
        """How much of the present part is still to come."""
        return len(self._left)

    def next(self, least_bytes: int = 0) -> Record | None:
        """The next record. None: nothing more can be received just now, or the peer has hung up.

        ``least_bytes``: also None if that much or more of a record's data is still to come, so that a thread of its own
        receives it; 0: never for that reason. Raises ProtocolError for what is no record, OSError if the socket fails.
        """
        while True:
            while self._left:
                if least_bytes and self._head is not None and len(self._left) >= least_bytes:
                    return None
                count = self._sock.receive(self._left)
                if count is None:
                    self._sock.expect(len(self._left))
                    return None
                if count == 0:
                    self.hung_up = True
                    return None
                self.received += count
                self._left = self._left[count:]
            if (record := self._advance()) is not None:
                return record

    def _advance(self) -> Record | None:
        """The present part is complete: begin the next part. A record, if this was its last part."""
        if self._head is None:
            head = self._head = parse(self._head_room)
            if self._hello and head.kind is not Kind.HELLO:
                raise errors.ProtocolError("it did not begin with a token")
            self._header = bytearray(head.header)
            self._left = memoryview(self._header)
            if self._left:
                return None
        head = self._head
        if head.data and not self._data:
            self._left = self._data = self._room_for(head)
            return None
        pieces = (self._data,) if self._data else ()
        record = Record(head.kind, bytes(self._header), pieces)
        self._head, self._data = None, memoryview(b"")
        self._left = memoryview(self._head_room)
        return record

    def _room_for(self, head: Head) -> memoryview:
        """Memory for the data of a record whose header has come."""
        place = self.place
        room = place(bytes(self._header), head.data) if place is not None and head.kind is Kind.FRAME else None
        return _room(head.data) if room is None else room


def _room(nbytes: int) -> memoryview:
    """Memory for data, aligned as chunks are. It is not cleared, and the system gives it when it is written to."""
    if nbytes < _SMALL_BYTES:
        return memoryview(bytearray(nbytes))
    import numpy as np

    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room.data[start : start + nbytes]
