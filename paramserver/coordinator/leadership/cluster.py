"""The coordinator's side of the servers: it calls each of them, all at once, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.core.job.membership import Member
from paramserver.transport.base import Channel

Connect = Callable[[str], Channel]
M = TypeVar("M", bound=Message)


class Servers:
    """Channels to the servers of the job, by member number."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._channels: dict[int, Channel] = {}

    async def dial_back(self, address: str, request: Message, timeout_s: float) -> None:
        """Check that a newcomer's address reaches it from here; raises UserError with a hint if not."""
        try:
            await self.ask(address, "Shard.Stats", request, timeout_s)
        except errors.RetryableError as error:
            raise errors.ConfigError(
                f"the coordinator cannot reach the server at {address}, the address it advertised: "
                "check the host name, the firewall, or give another one with --advertise-host"
            ) from error

    async def ask(self, address: str, method: str, request: Message, timeout_s: float) -> Message:
        """Call a server that is no member yet."""
        channel = self._connect(address)
        try:
            return await channel.call(method, request, timeout=timeout_s)
        finally:
            await channel.close()

    async def call(self, member: Member, method: str, request: Message, timeout_s: float) -> Message:
        """Call one server; errors name it."""
        channel = self._channels.get(member.ident)
        if channel is None:
            channel = self._channels[member.ident] = self._connect(member.address)
        try:
            return await channel.call(method, request, timeout=timeout_s)
        except errors.RetryableError as error:
            raise type(error)(f"{member.name} at {member.address} did not answer {method}: {error}") from error

    async def call_all(
        self,
        members: Sequence[Member],
        method: str,
        request: Message | Callable[[Member], Message],
        reply: type[M],
        timeout_s: float,
    ) -> list[M]:
        """Call all ``members`` at once, and return their replies in this order. ``request`` may depend on the member.

        Errors name the server. The first error is raised after all calls have ended.
        """
        calls = (
            self.call(member, method, request if isinstance(request, Message) else request(member), timeout_s)
            for member in members
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, reply)]

    async def forget(self, ident: int) -> None:
        """Close the channel of a server that is gone."""
        channel = self._channels.pop(ident, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all channels."""
        for ident in list(self._channels):
            await self.forget(ident)
