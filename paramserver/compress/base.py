"""The interface of compressors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paramserver.errors import ProtocolError
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

# Decoded numbers take at most so many times as many bytes as their payload.
MAX_EXPANSION = 1000
# Payloads are padded to a multiple of so many bytes, so that the next one in a message is aligned.
ALIGNMENT = 64


class Compressor(Protocol):
    """Turns a flat float32 tensor into bytes, and bytes into such a tensor; always the same for the same numbers."""

    # As settings and `ctx.register_push_hook` name it.
    name: str
    encoding: shard_pb2.Encoding
    # What it leaves out of one contribution belongs into the next one of the same slice position.
    feedback: bool

    def encode(self, values: Tensor, decoded: Tensor | None) -> Tensor:
        """The payload, a flat uint8 tensor. ``decoded`` takes the numbers that readers decode; it may be ``values``.

        Raises NonFiniteError for numbers that it cannot carry.
        """

    def check(self, nbytes: int, elements: int) -> None:
        """Raises ProtocolError if ``nbytes`` bytes cannot be a payload of so many elements. Allocates nothing."""

    def decode(self, payload: Buffer, elements: int) -> Tensor:
        """A tensor of its own. Raises ProtocolError for bytes that :meth:`encode` does not make."""


def require_length(name: str, nbytes: int, wanted: int, elements: int) -> None:
    """Raises ProtocolError unless a payload has the only length that it may have."""
    if nbytes != wanted:
        raise ProtocolError(f"{elements} elements in {name} take {wanted} bytes, not {nbytes}")


def padded(nbytes: int) -> int:
    """The length with padding."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
