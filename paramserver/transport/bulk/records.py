"""Records: what travels over a bulk connection. A head of 16 bytes, then a header, then data; both may be empty.

    0   2   magic "PS"
    2   1   version of this format
    3   1   kind
    4   4   bytes of the header, unsigned, big-endian
    8   8   bytes of the data, unsigned, big-endian

Pure: nothing here touches a socket.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from paramserver import errors
from paramserver.frames import MAX_FRAME_BYTES, MAX_HEADER_BYTES, AnyFrame, Frame

_HEAD = struct.Struct("!2sBBIQ")
_MAGIC, _VERSION = b"PS", 1
HEAD_BYTES = _HEAD.size


class Kind(enum.IntEnum):
    """The meaning of a record. The first of a connection is HELLO; each call begins with CALL."""

    HELLO = 1  # header: the token
    CALL = 2  # header: the method; data: the request of a download
    FRAME = 3  # header and data of a frame
    MESSAGE = 4  # data: a frame that is encoded already
    END = 5  # no more frames
    REPLY = 6  # data: the reply to an upload
    ERROR = 7  # header: the class of the error; data: its text


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest header and the largest data of each kind, in bytes."""

    header: int
    data: int


_MESSAGE = 16 * 2**20
LIMITS = {
    Kind.HELLO: Limits(64, 0),
    Kind.CALL: Limits(64, _MESSAGE),
    Kind.FRAME: Limits(MAX_HEADER_BYTES, MAX_FRAME_BYTES),
    Kind.MESSAGE: Limits(0, _MESSAGE),
    Kind.END: Limits(0, 0),
    Kind.REPLY: Limits(0, _MESSAGE),
    Kind.ERROR: Limits(64, 16 * 2**10),
}


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a record."""

    kind: Kind
    header: int
    data: int


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``pieces``: the data, which lies there until it is sent."""

    kind: Kind
    header: bytes = b""
    pieces: Sequence[memoryview] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return HEAD_BYTES + len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def head(self) -> bytes:
        """The head and the header as they travel."""
        data = sum(piece.nbytes for piece in self.pieces)
        return _HEAD.pack(_MAGIC, _VERSION, self.kind, len(self.header), data) + self.header

    def data(self) -> bytes:
        """A copy of the data."""
        return b"".join(self.pieces)

    def frame(self) -> AnyFrame:
        """The frame that it carries. Raises ProtocolError if it carries none."""
        if self.kind is Kind.FRAME:
            return Frame(self.header, self.pieces)
        if self.kind is Kind.MESSAGE:
            return self.data()
        raise errors.ProtocolError(f"a record of kind {self.kind.name} came where a frame belongs")


def parse(raw: bytes | bytearray | memoryview) -> Head:
    """The head in these HEAD_BYTES bytes. Raises ProtocolError if it is none, or claims more than its kind may have."""
    magic, version, kind, header, data = _HEAD.unpack(raw)
    if magic != _MAGIC:
        raise errors.ProtocolError("what came over a bulk connection is no record")
    if version != _VERSION or kind not in LIMITS:
        raise errors.ProtocolError(f"a record has version {version} and kind {kind}; this process knows neither or one")
    limits = LIMITS[Kind(kind)]
    if header > limits.header or data > limits.data:
        raise errors.ProtocolError(
            f"a record of kind {Kind(kind).name} claims {header} and {data} bytes; "
            f"its limits are {limits.header} and {limits.data}"
        )
    return Head(Kind(kind), header, data)


def of_frame(frame: AnyFrame) -> Record:
    """The record that carries a frame."""
    if isinstance(frame, Frame):
        return Record(Kind.FRAME, frame.header, frame.pieces)
    return Record(Kind.MESSAGE, pieces=(memoryview(frame),))


def of_error(kind: str, text: str) -> Record:
    """The record that carries an error: the name of its class, and its text."""
    return Record(Kind.ERROR, kind.encode(), (memoryview(text.encode()[: LIMITS[Kind.ERROR].data]),))
