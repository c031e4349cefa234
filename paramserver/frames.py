"""One message of a bulk stream: an encoded header and data, which may lie in several pieces.

A transport that can send pieces sends them from where they lie. Any other transport sends `Frame.message`, an ordinary
protobuf message:

    field 1   header: FrameHeader
    field 15  padding, zeros               unknown to the schema and skipped; at most 63 bytes
    field 2   data                         the pieces, without gaps; last

The padding makes the data begin at a multiple of 64 bytes within the message, so chunks are as well aligned as the
receiver's buffer is. A frame without data has neither of the last two fields.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 64
# The largest frame: a chunk of the largest size, with its header. Every transport takes frames and headers up to these.
MAX_FRAME_BYTES = 12 << 20
MAX_HEADER_BYTES = 1 << 20
HEADER, DATA, PADDING = 0x0A, 0x12, 0x7A  # number << 3 | 2


class Frame:
    """``header``: an encoded FrameHeader. ``pieces``: C-contiguous bytes, which stay as they are until all is sent."""

    __slots__ = ("_message", "_nbytes", "header", "pieces")

    def __init__(self, header: bytes, pieces: Sequence[memoryview] = ()) -> None:
        self.header, self.pieces = header, pieces
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._message: bytes | None = None

    @property
    def data_bytes(self) -> int:
        """The size of the data."""
        return self._nbytes

    def __len__(self) -> int:
        """Bytes of the header and the data."""
        return len(self.header) + self._nbytes

    def data(self) -> memoryview:
        """The data in one piece, read-only. Copies it if it lies in several pieces."""
        if len(self.pieces) == 1:
            return self.pieces[0].toreadonly()
        return memoryview(b"".join(self.pieces))

    def message(self) -> bytes:
        """The protobuf message; made once."""
        if self._message is None:
            self._message = b"".join((self.prefix(), *self.pieces))
        return self._message

    def prefix(self) -> bytes:
        """The bytes of the protobuf message that stand before the data."""
        prefix = bytearray((HEADER,)) + varint(len(self.header)) + self.header
        if self._nbytes:
            start = bytes((DATA,)) + varint(self._nbytes)
            gap = -(len(prefix) + len(start)) % ALIGNMENT
            if gap:
                gap += ALIGNMENT if gap == 1 else 0
                prefix += bytes((PADDING, gap - 2)) + bytes(gap - 2)
            prefix += start
        return bytes(prefix)


# A frame as services and callers hand it to a transport, or get it from one: a message may be encoded already.
AnyFrame = bytes | Frame


def message_of(frame: AnyFrame) -> bytes:
    """The protobuf message of a frame."""
    return frame.message() if isinstance(frame, Frame) else frame


def header_of(frame: AnyFrame) -> bytes:
    """The encoded header of a frame that begins with it; empty if it does not, or is cut off."""
    if isinstance(frame, Frame):
        return frame.header
    if frame[:1] != bytes((HEADER,)):
        return b""
    length = 0
    for at, byte in enumerate(frame[1:6]):
        length |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return frame[at + 2 : at + 2 + length]
    return b""


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
