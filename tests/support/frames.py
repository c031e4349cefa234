"""Frames as whole protobuf messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paramserver.frames import message_of
from paramserver.tensors.codec import frame_of
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from typing_extensions import Buffer


def encode_frame(header: shard_pb2.FrameHeader, parts: Sequence[Buffer]) -> bytes:
    """The header and the ``parts`` as one message. This is the only copy of the parts."""
    return message_of(frame_of(header, parts))
