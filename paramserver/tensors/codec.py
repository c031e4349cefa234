"""Frames of the bulk streams, encoded and decoded by hand so that tensors are not copied more than they must be.

What a frame looks like on the wire: see `frames`. Stock protobuf reads it.

A decoder takes what stock protobuf would write: fields in any order, and unknown fields are skipped. It is stricter in
three points: a known field with another wire type is refused instead of skipped, and so is a frame with two headers
or two data fields, and lengths are bounded. Decoding allocates for what is there, never for what a length claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from paramserver.errors import ProtocolError
from paramserver.frames import DATA, HEADER, MAX_FRAME_BYTES, MAX_HEADER_BYTES, AnyFrame, Frame
from paramserver.v1 import shard_pb2 as shard

if TYPE_CHECKING:
    from typing_extensions import Buffer

Ref = shard.ChunkRef | shard.StateRef
First = shard.PushHeader | shard.InitializeHeader | shard.PullHeader | shard.ForwardHeader | shard.CatchUpHeader

MAX_REFS = 4096
# No message has more around the header and the data of its frame: tags, lengths and padding.
_MOST_AROUND = 80
TARGET_BYTES = 4 * 2**20

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_DEPTH = 100


def frame_of(header: shard.FrameHeader, parts: Sequence[Buffer] = ()) -> Frame:
    """One frame of the header and the ``parts`` one after the other, which are not copied.

    ``parts`` are C-contiguous, and stay as they are until the frame is sent. Raises ValueError if the header or the
    frame is too large.
    """
    head = header.SerializeToString()
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"a frame header of {len(head)} bytes is over the limit of {MAX_HEADER_BYTES}; list less")
    frame = Frame(head, [view.cast("B") for part in parts if (view := memoryview(part)).nbytes])
    if (
        len(frame) + _MOST_AROUND > MAX_FRAME_BYTES
        and (size := len(frame.prefix()) + frame.data_bytes) > MAX_FRAME_BYTES
    ):
        raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}: use smaller chunks")
    return frame


def decode_frame(raw: AnyFrame) -> tuple[shard.FrameHeader, memoryview]:
    """The header and a read-only view of the data (empty if there is none), which keeps ``raw`` alive.

    Raises ProtocolError for anything that is no valid frame.
    """
    size = len(raw)
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    if isinstance(raw, Frame):
        return header_from(raw.header), raw.data()
    head: tuple[int, int] | None = None
    data: tuple[int, int] | None = None
    at = 0
    while at < size:
        tag, at = _read_varint(raw, at, 5)
        if tag == HEADER:
            if head is not None:
                raise ProtocolError("a frame has two headers; send each in a frame of its own")
            head = _read_range(raw, at)
            at = head[1]
        elif tag == DATA:
            if data is not None:
                raise ProtocolError("a frame has two data fields; send each in a frame of its own")
            data = _read_range(raw, at)
            at = data[1]
        else:
            at = _skip(raw, at, tag)
    if head is not None and head[1] - head[0] > MAX_HEADER_BYTES:
        raise ProtocolError(f"a frame header of {head[1] - head[0]} bytes is over the limit of {MAX_HEADER_BYTES}")
    view = memoryview(raw).toreadonly()
    header = header_from(raw[head[0] : head[1]] if head is not None else b"")
    return header, view[data[0] : data[1]] if data is not None else view[:0]


def header_from(encoded: bytes) -> shard.FrameHeader:
    """The header of a frame. Raises ProtocolError for bytes that are none."""
    header = shard.FrameHeader()
    try:
        header.MergeFromString(encoded)
    except DecodeError as error:
        raise ProtocolError("the header of a frame is no valid FrameHeader") from error
    return header


def split_frame(raw: AnyFrame) -> tuple[shard.FrameHeader, list[tuple[Ref, memoryview]]]:
    """Decodes a frame and gives every chunk, then every state, that the header lists its part of the data.

    Raises ProtocolError for anything that is no valid frame, and if the lengths do not add up to the data.
    """
    header, data = decode_frame(raw)
    listed: list[Ref] = [*header.chunks, *header.states]
    total = sum(ref.bytes for ref in listed)
    if total != len(data):
        raise ProtocolError(f"the header of a frame lists {total} bytes, but {len(data)} bytes of data follow")
    parts: list[tuple[Ref, memoryview]] = []
    at = 0
    for ref in listed:
        parts.append((ref, data[at : at + ref.bytes]))
        at += ref.bytes
    return header, parts


def chunk_frames(
    first: First | None, chunks: Iterable[tuple[Ref, Buffer]], target_bytes: int = TARGET_BYTES
) -> Iterator[Frame]:
    """Packs chunks (or pieces of state) into frames of about ``target_bytes`` of data, in the order given.

    ``first`` goes into the first frame, which is sent even when there are no chunks; without both there is no frame.
    ``chunks`` is read as the frames are asked for. Raises ValueError if a buffer is not as long as its reference says,
    or if a chunk is too large for a frame.
    """
    header = _first_header(first)
    parts: list[Buffer] = []
    held = 0
    for ref, buffer in chunks:
        length = memoryview(buffer).nbytes
        if length != ref.bytes:
            raise ValueError(f"{length} bytes were given for a reference to {ref.bytes} bytes")
        if parts and (held + length > target_bytes or len(parts) == MAX_REFS):
            yield frame_of(header, parts)
            header, parts, held = shard.FrameHeader(), [], 0
        if isinstance(ref, shard.ChunkRef):
            assert not header.states, "a frame lists chunks before states, as split_frame reads them"
            header.chunks.append(ref)
        else:
            header.states.append(ref)
        parts.append(buffer)
        held += length
    if parts or first is not None:
        yield frame_of(header, parts)


def _first_header(first: First | None) -> shard.FrameHeader:
    if isinstance(first, shard.PushHeader):
        return shard.FrameHeader(push=first)
    if isinstance(first, shard.InitializeHeader):
        return shard.FrameHeader(initialize=first)
    if isinstance(first, shard.PullHeader):
        return shard.FrameHeader(pull=first)
    if isinstance(first, shard.ForwardHeader):
        return shard.FrameHeader(forward=first)
    if isinstance(first, shard.CatchUpHeader):
        return shard.FrameHeader(catch_up=first)
    return shard.FrameHeader()


def _read_varint(raw: bytes, at: int, longest: int) -> tuple[int, int]:
    """A number of at most ``longest`` bytes at ``at``, and where it ends."""
    value = 0
    for position in range(longest):
        if at + position >= len(raw):
            raise ProtocolError("a frame is cut off in the middle of a number")
        byte = raw[at + position]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, at + position + 1
    raise ProtocolError(f"a frame has a number of more than {longest} bytes")


def _read_range(raw: bytes, at: int) -> tuple[int, int]:
    """Where a length-delimited field lies whose length begins at ``at``."""
    length, at = _read_varint(raw, at, 5)
    if length > len(raw) - at:
        raise ProtocolError(f"a field of a frame claims {length} bytes, but {len(raw) - at} bytes are left")
    return at, at + length


def _skip(raw: bytes, at: int, tag: int) -> int:
    """Where an unknown field ends whose tag was just read. Groups are skipped with their contents."""
    groups: list[int] = []
    while True:
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise ProtocolError(f"a frame has a field with the impossible number {number}")
        if number <= 2 and not groups:
            raise ProtocolError(f"field {number} of a frame has wire type {wire}; it needs wire type {_BYTES}")
        if wire == _VARINT:
            _, at = _read_varint(raw, at, 10)
        elif wire == _FIXED64:
            at += 8
        elif wire == _BYTES:
            _, at = _read_range(raw, at)
        elif wire == _FIXED32:
            at += 4
        elif wire == _GROUP:
            groups.append(number)
            if len(groups) > _MAX_DEPTH:
                raise ProtocolError(f"a frame has groups nested more than {_MAX_DEPTH} deep")
        elif wire == _END_GROUP:
            if not groups or groups.pop() != number:
                raise ProtocolError(f"a frame ends group {number}, which is not open")
        else:
            raise ProtocolError(f"field {number} of a frame has the unknown wire type {wire}")
        if at > len(raw):
            raise ProtocolError(f"a frame is cut off in field {number}")
        if not groups:
            return at
        tag, at = _read_varint(raw, at, 5)
