"""How envelopes follow one another on a socket between two processes of one host: each behind its length."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from paramserver.errors import ProtocolError
from paramserver.transport.base import MAX_MESSAGE_BYTES
from paramserver.v1.local_pb2 import Envelope

_LENGTH_BYTES = 4
# A message, and what goes with it.
_MOST_BYTES = MAX_MESSAGE_BYTES + (64 << 10)


def pack(envelope: Envelope) -> bytes:
    """The envelope behind its length."""
    raw = envelope.SerializeToString()
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def unpack(come: bytearray) -> Iterator[Envelope]:
    """The envelopes that have come whole, which are then removed. Raises ProtocolError for what is none."""
    start = 0
    try:
        while len(come) - start >= _LENGTH_BYTES:
            length = int.from_bytes(come[start : start + _LENGTH_BYTES], "little")
            if length > _MOST_BYTES:
                raise ProtocolError(f"an envelope of {length} bytes is over the limit of {_MOST_BYTES}")
            stop = start + _LENGTH_BYTES + length
            if len(come) < stop:
                break
            envelope = Envelope()
            try:
                envelope.ParseFromString(bytes(come[start + _LENGTH_BYTES : stop]))
            except DecodeError as error:
                raise ProtocolError(f"{length} bytes that are no envelope") from error
            start = stop
            yield envelope
    finally:
        del come[:start]
