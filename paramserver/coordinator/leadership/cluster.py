"""The coordinator's side of servers and shards: it calls the shards, all at once, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.dialling import Dialling
from paramserver.coordinator.options import JobOptions
from paramserver.core.job.membership import Member, Membership, Role
from paramserver.core.layout.replanning import shard_number
from paramserver.transport.addresses import shard_address
from paramserver.transport.base import Channel, showing
from paramserver.transport.security.fields import check_numbers
from paramserver.v1 import shard_pb2, types_pb2

Connect = Callable[[str], Channel]
M = TypeVar("M", bound=Message)


class Servers:
    """Channels to the shards of the job."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        # By the member number of the server, and by the number of the shard in its address.
        self._channels: dict[tuple[int, int], Channel] = {}
        # The number of the plan in force.
        self._plan = 0
        self._dialling = Dialling()

    def use(self, plan: int) -> None:
        """The plan of this number is in force."""
        self._plan = plan

    def address(self, member: Member, shard: int, plan: int | None = None) -> str:
        """The address of a shard of a plan (None: of the plan in force) at a server."""
        return shard_address(member.address, self._number(shard, plan))

    def _number(self, shard: int, plan: int | None) -> int:
        return shard_number(self._plan if plan is None else plan, shard)

    async def dial_back(self, address: str, job: str, timeout_s: float) -> None:
        """Check that the address that a caller names reaches a server from here; see `Dialling.back`."""
        request = shard_pb2.StatsRequest(job=job)
        await self._dialling.back(
            address, timeout_s, lambda within_s: self.ask(address, "Shard.Stats", request, within_s)
        )

    async def ask(self, address: str, method: str, request: Message, timeout_s: float, key: bytes = b"") -> Message:
        """Call a server that is no member yet. ``key``: the one that it has given to this coordinator."""
        channel = self._connect(address)
        try:
            with showing(key):
                return _believed(await channel.call(method, request, timeout=timeout_s))
        finally:
            await channel.close()

    async def call(
        self, member: Member, shard: int, method: str, request: Message, timeout_s: float, plan: int | None = None
    ) -> Message:
        """Call one shard at its server; errors name the server. ``plan``: as for :meth:`address`."""
        key = member.ident, self._number(shard, plan)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = self._connect(self.address(member, shard, plan))
        if isinstance(request, shard_pb2.ConfigureRequest | shard_pb2.RestoreRequest):
            # Another process may have begun at this address, which is no member yet.
            configure = request if isinstance(request, shard_pb2.ConfigureRequest) else request.configure
            configure.incarnation = member.incarnation
        try:
            with showing(member.key):
                return _believed(await channel.call(method, request, timeout=timeout_s))
        except errors.RetryableError as error:
            raise type(error)(f"{member.name} at {member.address} did not answer {method}: {error}") from error

    async def call_all(
        self,
        places: Sequence[tuple[int, Member]],
        method: str,
        request: Message | Callable[[int], Message],
        reply: type[M],
        timeout_s: float,
    ) -> list[M]:
        """Call all shards in ``places``, each at its server, at once; return their replies in this order.

        ``request`` may depend on the shard. Errors name the server. The first error is raised after all calls have
        ended.
        """
        calls = (
            self.call(member, shard, method, request if isinstance(request, Message) else request(shard), timeout_s)
            for shard, member in places
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, reply)]

    async def forget(self, ident: int) -> None:
        """Close the channels of a server that is gone."""
        for key in [key for key in self._channels if key[0] == ident]:
            await self._channels.pop(key).close()

    async def close(self) -> None:
        """Close all channels."""
        while self._channels:
            await self._channels.popitem()[1].close()


def _believed(reply: Message) -> Message:
    """The reply, if its numbers can be; raises ProtocolError. Coordinators go on counting from those of servers."""
    if isinstance(reply, shard_pb2.StatsResponse):
        check_numbers(reply)
    return reply


class _Job(ports.Holding, Protocol):
    options: JobOptions
    members: Membership
    servers: Servers


class Shards:
    """All shards of the job, each at the server that is its primary now."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def _places(self) -> list[tuple[int, Member]]:
        """The shards whose primary is there, by index, with their primaries."""
        servers = {server.index: server for server in self._job.members.of(Role.SERVER)}
        primaries = self._job.holders.primaries
        return [(shard, servers[index]) for shard, index in enumerate(primaries) if index in servers]

    def infos(self) -> list[types_pb2.ShardInfo]:
        """The shards whose primary is there, by index."""
        return [
            types_pb2.ShardInfo(index=shard, address=self._job.servers.address(server, shard), server=server.name)
            for shard, server in self._places()
        ]

    async def stats(self) -> list[shard_pb2.StatsResponse]:
        """Ask all shards now."""
        request = shard_pb2.StatsRequest(job=self._job.options.job)
        return await self.ask("Shard.Stats", request, shard_pb2.StatsResponse)

    async def ask(
        self,
        method: str,
        request: Message | Callable[[int], Message],
        reply: type[M],
        timeout_s: float | None = None,
        present: bool = False,
    ) -> list[M]:
        """Call all shards at once; the first error is raised after all calls have ended.

        ``request``: the message, or a function that makes it for each shard. ``timeout_s``: as for all calls if None.
        ``present``: call the shards whose primary is a member now. Without it a primary that is missing is an error,
        and no shard is called: an answer without one shard would pass for the answer of all.

        Raises UnavailableError for a server that is missing or does not answer.
        """
        job, places = self._job, self._places()
        if not present and len(places) < len(job.holders):
            away = job.members.empty_seats(Role.SERVER, job.options.servers)
            raise errors.UnavailableError(f"{', '.join(away)} cannot be reached now: try again later")
        return await job.servers.call_all(places, method, request, reply, timeout_s or job.options.call_timeout_s)
