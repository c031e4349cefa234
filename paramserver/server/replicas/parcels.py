"""The messages from a primary to its backups, each of which may be sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from paramserver import errors
from paramserver.core.layout.plan import MAX_CHUNK_BYTES, Chunk
from paramserver.frames import AnyFrame
from paramserver.server.arithmetic.state import StateEntry
from paramserver.server.replicas.outbox import Loan
from paramserver.server.versions.drafting import Draft, Drafting
from paramserver.tensors.codec import Ref, chunk_frames, frame_of
from paramserver.tensors.dtypes import buffer_of
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger("paramserver.server")

# How long an attempt may take, and how much longer for each byte, which is the time on a link of 1 Mb/s.
_ATTEMPT_S, _BYTE_S = 10.0, 8e-6
# A longer piece of optimizer state is sent in parts. Only that of a whole tensor is longer.
_PART_BYTES = MAX_CHUNK_BYTES


class Parcel(Protocol):
    """One message."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Send it; ``loan``: the backup can read the outbox. Raises what the call raises."""


class DraftParcel:
    """The chunks of a draft on their way to a backup, until the shard decides whether the draft is the next version.

    ``wait_s``: the longest time that this takes.
    """

    def __init__(
        self,
        header: shard_pb2.ForwardHeader,
        chunks: Mapping[int, Chunk],
        draft: Draft,
        drafting: Drafting,
        wait_s: float,
    ) -> None:
        self._header = shard_pb2.ForwardHeader()
        self._header.CopyFrom(header)
        self._header.ahead = True
        self._chunks, self._draft, self._drafting, self._wait_s = chunks, draft, drafting, wait_s
        self.content = draft.content
        # The chunks that the backup has.
        self.sent: set[int] = set()

    @property
    def number(self) -> int:
        """Of the draft."""
        return self._draft.number

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""
        return sum(self._chunks[index].nbytes for index in self.sent)

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Send it. If that fails, all of it comes with the version."""
        try:
            await channel.upload("Shard.Forward", self._frames(), timeout=self._wait_s)
        except errors.ParamServerError as error:
            log.debug("could not send a draft to a backup", at=channel.address, error=str(error))
            self.sent.clear()

    async def _frames(self) -> AsyncIterator[AnyFrame]:
        yield frame_of(shard_pb2.FrameHeader(forward=self._header), ())
        stir = asyncio.Event()
        self._drafting.listeners.add(stir)
        try:
            taken = 0
            while self._drafting.draft is self._draft:
                stir.clear()
                if taken == len(self._draft.order):
                    await stir.wait()
                    continue
                index = self._draft.order[taken]
                taken += 1
                if self.content is not None and index in self.content.chunks:
                    self.sent.add(index)
                    ref, data = chunk_ref(self._chunks[index]), buffer_of(self.content.chunks[index])
                    yield frame_of(shard_pb2.FrameHeader(chunks=[ref]), [data])
        finally:
            self._drafting.listeners.discard(stir)


class ForwardParcel:
    """The content of the next version, for the chunks that a backup has. ``lent``: the content lies in the outbox.

    ``ahead``: the chunks of this draft were sent before. ``feed``: of a shard of a new plan; 0: of a backup.
    """

    def __init__(
        self,
        header: shard_pb2.ForwardHeader,
        chunks: Mapping[int, Chunk],
        combined: Mapping[int, Tensor],
        lent: bool,
        ahead: DraftParcel | None = None,
        feed: int = 0,
    ) -> None:
        self._header = shard_pb2.ForwardHeader()
        self._header.CopyFrom(header)
        self._header.feed = feed
        self._method = "Shard.ForwardPart" if feed else "Shard.Forward"
        self._chunks, self._combined, self._lent, self._ahead = chunks, combined, lent, ahead

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in it."""
        return sum(self._chunks[index].nbytes for index in self._combined)

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Send it; the backup holds all of it when this returns, and reads nothing older."""
        timeout_s = _ATTEMPT_S + self.nbytes * _BYTE_S
        if loan is not None and loan.good and self._lent:
            self._header.chunks = 0
            self._header.shared.meeting = loan.meeting
            reply = await loan.channel.call("Shard.ForwardLent", self._header, timeout=timeout_s)
            if not cast(shard_pb2.ForwardResponse, reply).unreadable:
                return
            loan.good = False
            log.info("a backup cannot read the memory of its primary, and is sent versions", at=channel.address)
        self._header.ClearField("shared")
        there = self._ahead.sent if self._ahead is not None else set()
        if not await self._upload(channel, timeout_s, there):
            await self._upload(channel, timeout_s, set())

    async def _upload(self, channel: Channel, timeout_s: float, there: Collection[int]) -> bool:
        """Send the chunks but those that are ``there``. False: the backup lacks some."""
        combined = {index: tensor for index, tensor in self._combined.items() if index not in there}
        self._header.draft = self._ahead.number if self._ahead is not None and there else 0
        self._header.chunks = len(combined)
        parts = ((chunk_ref(self._chunks[index]), buffer_of(tensor)) for index, tensor in combined.items())
        reply = await channel.upload(self._method, chunk_frames(self._header, parts), timeout=timeout_s)
        return not cast(shard_pb2.ForwardResponse, reply).unreadable


class MadeParcel:
    """Nothing: it has arrived when a backup that reads the outbox has made the version after that of ``header``."""

    nbytes = 0

    def __init__(self, header: shard_pb2.ForwardHeader) -> None:
        self._request = shard_pb2.MadeLentRequest(
            job=header.job, timeline=header.timeline, placement=header.placement, version=header.version + 1
        )

    async def send(self, channel: Channel, loan: Loan | None) -> None:
        """Return when the backup reads nothing in the outbox."""
        if loan is not None and loan.good:
            await loan.channel.call("Shard.MadeLent", self._request, timeout=_ATTEMPT_S)


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
        frames = await self.frames()
        method = "Shard.CatchUpPart" if self.header.feed else "Shard.CatchUp"
        await channel.upload(method, frames, timeout=_ATTEMPT_S + self.nbytes * _BYTE_S)

    async def frames(self) -> Iterator[AnyFrame]:
        """The frames of the message."""
        if self._states is None:
            self._states = await self._copying
        states = list(_state_parts(self._states))
        self.header.chunks, self.header.states = len(self._chunks), len(states)

        def parts() -> Iterator[tuple[Ref, memoryview]]:
            for chunk in self._chunks:
                yield chunk_ref(chunk), buffer_of(self._weights[chunk.index])
            yield from states

        return chunk_frames(self.header, parts())


def _state_parts(entries: Sequence[StateEntry]) -> Iterator[tuple[shard_pb2.StateRef, memoryview]]:
    """Pieces of optimizer state. A number for a whole tensor is there once."""
    seen: set[tuple[int, str]] = set()
    for tensor, key, start, data, scalar in entries:
        if scalar and (tensor, key) in seen:
            continue
        if scalar:
            seen.add((tensor, key))
        yield from state_pieces((tensor, key, start, data, scalar), _PART_BYTES)


def state_pieces(entry: StateEntry, most_bytes: int) -> Iterator[tuple[shard_pb2.StateRef, memoryview]]:
    """An entry of optimizer state, cut into pieces of ``most_bytes`` at most."""
    tensor, key, start, data, scalar = entry
    flat = data.reshape(-1)
    most = max(1, most_bytes // flat.element_size())
    for offset in range(0, flat.numel(), most):
        part = flat[offset : offset + most]
        ref = shard_pb2.StateRef(
            tensor=tensor,
            key=key,
            start=start + offset,
            bytes=part.numel() * part.element_size(),
            dtype=str(part.dtype).removeprefix("torch."),
            scalar=scalar,
        )
        yield ref, buffer_of(part.contiguous())
