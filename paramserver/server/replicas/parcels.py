"""The messages from a primary to its backups, each of which may be sent again."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from paramserver.core.layout.plan import Chunk
from paramserver.server.arithmetic.apply import StateEntry
from paramserver.server.replicas.outbox import Loan
from paramserver.tensors.codec import Ref, chunk_frames
from paramserver.tensors.dtypes import buffer_of
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger("paramserver.server")

# How long an attempt may take, and how much longer for each byte, which is the time on a link of 1 Mb/s.
_ATTEMPT_S, _BYTE_S = 10.0, 8e-6


class Parcel(Protocol):
    """One message."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Send it; ``loan``: the backup can read the outbox. Raises what the call raises."""


class ForwardParcel:
    """What the next version of the chunks that a backup has is made of. ``slot``: where it lies in the outbox."""

    def __init__(
        self,
        header: shard_pb2.ForwardHeader,
        chunks: Mapping[int, Chunk],
        combined: Mapping[int, Tensor],
        slot: int | None,
    ) -> None:
        self._header = shard_pb2.ForwardHeader()
        self._header.CopyFrom(header)
        self._chunks, self._combined, self._slot = chunks, combined, slot

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""
        return sum(self._chunks[index].nbytes for index in self._combined)

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Send it; the backup holds all of it when this returns, and reads nothing older."""
        timeout_s = _ATTEMPT_S + self.nbytes * _BYTE_S
        if loan is not None and loan.good and self._slot is not None:
            self._header.chunks = 0
            self._header.shared.meeting, self._header.shared.slot = loan.meeting, self._slot
            frames = chunk_frames(self._header, ())
            reply = await loan.channel.upload("Shard.Forward", frames, timeout=timeout_s)
            if not cast(shard_pb2.ForwardResponse, reply).unreadable:
                return
            loan.good = False
            log.info("a backup cannot read the memory of its primary, and is sent versions", at=channel.address)
        self._header.ClearField("shared")
        self._header.chunks = len(self._combined)
        parts = ((chunk_ref(self._chunks[index]), buffer_of(tensor)) for index, tensor in self._combined.items())
        await channel.upload("Shard.Forward", chunk_frames(self._header, parts), timeout=timeout_s)


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

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Send it over ``channel``; the backup has all of it when this returns."""
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
