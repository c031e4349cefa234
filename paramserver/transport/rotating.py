"""One channel to the coordinator that leads, where several addresses are known."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport.base import Channel, Frames, Neighbour, Place


class RotatingChannel:
    """See `base.Channel`. A call goes to the present address; one that fails makes the next call try the next one."""

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], Channel]) -> None:
        assert addresses, "a channel needs an address"
        self._channels = [connect(address) for address in addresses]
        self._present = 0

    @property
    def kind(self) -> str:
        """See `base.Channel`."""
        return self._channels[self._present].kind

    @property
    def address(self) -> str:
        """The present address."""
        return self._channels[self._present].address

    def rotate(self) -> None:
        """From now on use the next address."""
        self._present = (self._present + 1) % len(self._channels)

    @contextmanager
    def _using(self) -> Iterator[Channel]:
        used = self._present
        try:
            yield self._channels[used]
        except errors.UnavailableError:
            if used == self._present:
                self.rotate()
            raise

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        with self._using() as channel:
            return await channel.call(method, request, timeout=timeout)

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """See `base.Channel`."""
        with self._using() as channel:
            return await channel.upload(method, frames, timeout=timeout)

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """See `base.Channel`."""
        with self._using() as channel:
            async with aclosing(channel.download(method, request, timeout=timeout, place=place)) as frames:
                async for frame in frames:
                    yield frame

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`."""
        with self._using() as channel:
            async with aclosing(channel.session(method, requests)) as replies:
                async for reply in replies:
                    yield reply

    def beside(self, sock: socket.socket) -> Neighbour:
        """See `base.Channel`."""
        return self._channels[self._present].beside(sock)

    async def close(self) -> None:
        """See `base.Channel`."""
        for channel in self._channels:
            await channel.close()


def coordinator_channel(addresses: Sequence[str], connect: Callable[[str], Channel]) -> Channel:
    """A channel to the coordinator at one of these addresses."""
    return RotatingChannel(addresses, connect) if len(addresses) > 1 else connect(addresses[0])
