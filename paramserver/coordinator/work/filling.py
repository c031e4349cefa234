"""The shards of a new plan at their servers, before the plan is in force: they are configured, and filled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from google.protobuf.message import Message

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.core.job.holders import Holders
from paramserver.core.job.membership import Member
from paramserver.v1 import shard_pb2, types_pb2

T = TypeVar("T")
# How long the new shards may take to get the chunks that they lack.
_FILL_S = 600.0


class _Registry(Protocol):
    """See `coordinator.model`."""

    def configuration(self, shard: int) -> shard_pb2.ConfigureRequest: ...


class _Job(ports.Stage, ports.Commands, Protocol):
    servers: Servers

    @property
    def registry(self) -> _Registry: ...


class Filling:
    """The shards of plan ``plan``, before it is in force."""

    def __init__(self, job: _Job, plan: int, wanted: int, holders: Holders, servers: Mapping[int, Member]) -> None:
        """``wanted`` shards. ``holders``: of the former shards. ``servers``: by their index."""
        self._job, self._plan, self._servers = job, plan, servers
        self.holders, self._former = Holders.spread(wanted, holders), len(holders)
        self._sources, self._placement = job.shards.infos(), holders.number
        self._peers = [
            types_pb2.ShardInfo(
                index=shard, address=self._address(held.primary, shard), server=servers[held.primary].name
            )
            for shard, held in enumerate(self.holders.shards)
        ]
        shards = list(enumerate(self.holders.shards))
        # (server, shard, whether it is a backup there)
        self._copies = [(held.primary, shard, False) for shard, held in shards]
        self._copies += [(one.server, shard, True) for shard, held in shards for one in held.backups]

    def _address(self, server: int, shard: int) -> str:
        return self._job.servers.address(self._servers[server], shard, self._plan)

    def check(self) -> None:
        """Raise UnavailableError if a server is not there any more."""
        if any(one.ident not in self._job.members for one in self._servers.values()):
            raise errors.UnavailableError("a server was lost meanwhile")

    async def ahead(self, consistency: types_pb2.Consistency) -> bool:
        """Have the former shards bring all copies their chunks; whether all of it is there. Raises what calls raise."""
        if len(self._sources) < self._former:  # a former shard has no server at the moment
            return False
        timeout_s = self._job.options.call_timeout_s
        replies = await _all([self._configure(*copy, consistency, None, timeout_s) for copy in self._copies])
        return all(reply.whole for reply in replies)

    async def fill(self, version: int, consistency: types_pb2.Consistency) -> None:
        """Fill all copies of all shards, then tell the primaries of their backups. Raises what the calls raise.

        The former shards stand at ``version``.
        """
        await _all([self._configure(*copy, consistency, version, _FILL_S) for copy in self._copies])
        await _all([self._set_holders(shard, consistency) for shard in range(len(self.holders))])

    async def _configure(
        self,
        server: int,
        shard: int,
        backup: bool,
        consistency: types_pb2.Consistency,
        version: int | None,
        timeout_s: float,
    ) -> shard_pb2.ConfigureResponse:
        """``version``: at which the former shards stand; None: they do not stand yet."""
        job = self._job
        configure = job.registry.configuration(shard)
        configure.timeline, configure.shards, configure.backup = job.timeline + 1, len(self.holders), backup
        configure.consistency.CopyFrom(consistency)
        del configure.peers[:]
        configure.peers.extend(self._peers)
        filling = shard_pb2.Filling(
            sources=self._sources,
            timeline=job.timeline,
            version=version or 0,
            ahead=version is None,
            placement=self._placement,
            address=self._address(server, shard),
            repair_mbps=job.options.repair_mbps,
        )
        configure.filling.CopyFrom(filling)
        reply = await self._call(server, shard, "Shard.Configure", configure, timeout_s)
        return cast(shard_pb2.ConfigureResponse, reply)

    async def _set_holders(self, shard: int, consistency: types_pb2.Consistency) -> None:
        job, held = self._job, self.holders.shards[shard]
        request = shard_pb2.SetHoldersRequest(
            job=job.options.job,
            timeline=job.timeline + 1,
            term=job.term,
            placement=self.holders.number,
            primary=True,
            backups=[
                shard_pb2.BackupPlace(address=self._address(one.server, shard), since=one.since, whole=True)
                for one in held.backups
            ],
            peers=self._peers,
            consistency=consistency,
            repair_mbps=job.options.repair_mbps,
        )
        await self._call(held.primary, shard, "Shard.SetHolders", request, job.options.call_timeout_s)

    async def _call(
        self,
        server: int,
        shard: int,
        method: str,
        request: shard_pb2.ConfigureRequest | shard_pb2.SetHoldersRequest,
        timeout_s: float,
    ) -> Message:
        return await self._job.servers.call(self._servers[server], shard, method, request, timeout_s, self._plan)


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all calls; raise the first error after all have ended."""
    found: list[T] = []
    for one in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found
