"""The messages from a primary to its backups, each of which may be sent again."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paramserver.core.layout.plan import Chunk
from paramserver.server.arithmetic.apply import StateEntry
from paramserver.tensors.codec import Ref, chunk_frames
from paramserver.tensors.dtypes import buffer_of
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref

if TYPE_CHECKING:
    from torch import Tensor

# How long an attempt may take, and how much longer for each byte, which is the time on a link of 1 Mb/s.
_ATTEMPT_S, _BYTE_S = 10.0, 8e-6


class Parcel(Protocol):
    """One message."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""

    async def send(self, channel: Channel) -> None:
        """Send it. Raises what the call raises."""


class ForwardParcel:
    """What the next version of the chunks that a backup has is made of."""

    def __init__(
        self, header: shard_pb2.ForwardHeader, chunks: Mapping[int, Chunk], combined: Mapping[int, Tensor]
    ) -> None:
        self._header = shard_pb2.ForwardHeader()
        self._header.CopyFrom(header)
        self._header.chunks = len(combined)
        self._chunks, self._combined = chunks, combined

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""
        return sum(self._chunks[index].nbytes for index in self._combined)

    async def send(self, channel: Channel) -> None:
        """Send it; the backup holds all of it when this returns."""
        parts = ((chunk_ref(self._chunks[index]), buffer_of(tensor)) for index, tensor in self._combined.items())
        frames = chunk_frames(self._header, parts)
        await channel.upload("Shard.Forward", frames, timeout=_ATTEMPT_S + self.nbytes * _BYTE_S)


class CatchUpParcel:
    """Some chunks as they are in one version. ``states`` gives their optimizer state, copied.

    ``keeps``: keeps the memory of the weights as it is, as long as this object exists.
    """

    def __init__(
        self,
        header: shard_pb2.CatchUpHeader,
        chunks: Sequence[Chunk],
        weights: Mapping[int, Tensor],
        states: Awaitable[list[StateEntry]],
        keeps: object,
    ) -> None:
        self.header, self._keeps = header, keeps
        self._chunks, self._weights = chunks, weights
        self._copying = states
        self._states: list[StateEntry] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it, as far as they are known."""
        state = sum(entry[3].nbytes for entry in self._states or ())
        return state + sum(chunk.nbytes for chunk in self._chunks)

    async def send(self, channel: Channel) -> None:
        """Send it; the backup has all of it when this returns."""
        if self._states is None:
            self._states = await self._copying
        states = list(_state_parts(self._states))
        self.header.chunks, self.header.states = len(self._chunks), len(states)

        def parts() -> Iterator[tuple[Ref, memoryview]]:
            for chunk in self._chunks:
                yield chunk_ref(chunk), buffer_of(self._weights[chunk.index])
            yield from states

        frames = chunk_frames(self.header, parts())
        await channel.upload("Shard.CatchUp", frames, timeout=_ATTEMPT_S + self.nbytes * _BYTE_S)


def _state_parts(entries: Sequence[StateEntry]) -> Iterator[tuple[shard_pb2.StateRef, memoryview]]:
    """Pieces of optimizer state. A number for a whole tensor is there once."""
    seen: set[tuple[int, str]] = set()
    for tensor, key, start, data, scalar in entries:
        if scalar and (tensor, key) in seen:
            continue
        if scalar:
            seen.add((tensor, key))
        flat = data.reshape(-1)
        ref = shard_pb2.StateRef(
            tensor=tensor,
            key=key,
            start=start,
            bytes=flat.numel() * flat.element_size(),
            dtype=str(flat.dtype).removeprefix("torch."),
            scalar=scalar,
        )
        yield ref, buffer_of(flat.contiguous())
