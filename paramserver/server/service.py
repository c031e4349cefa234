"""A server process behind its RPCs: its shards, and which of them answers which call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from paramserver import errors
from paramserver.core.layout.replanning import plan_number
from paramserver.server.collectives.collecting import Collecting
from paramserver.server.rpc.attaching import Attaching
from paramserver.server.rpc.contributions import Contributions
from paramserver.server.rpc.control import Control
from paramserver.server.rpc.facts import Facts
from paramserver.server.rpc.host import Host
from paramserver.server.rpc.parts import PartsCalls
from paramserver.server.rpc.process import Process
from paramserver.server.rpc.pulls import Pulls
from paramserver.server.rpc.replicas import Replicas
from paramserver.server.rpc.setup import Setup
from paramserver.transport.base import METHODS, Channel, Method, addressed
from paramserver.v1 import shard_pb2

# Commands that give the process another shard.
_GIVES = ("configure", "restore")
# Above all numbers of shards in addresses.
_NUMBERS = 1 << 31


class ShardService:
    """One shard, and the parts that answer calls to it. Its attributes named like RPCs are the RPCs."""

    def __init__(self, process: Process, plan: int = 0, collecting: Collecting | None = None) -> None:
        """``plan``: the number of the plan to which the shard belongs. ``collecting``: the process groups."""
        self.host = host = Host(process, plan)
        setup = Setup(host)
        self.contributions = contributions = Contributions(host)
        self._pulls = pulls = Pulls(host, contributions)
        self._facts = facts = Facts(host, contributions, pulls)
        control = Control(host)
        # From nothing to a published version.
        self.configure, self.initialize = setup.configure, setup.initialize
        self.restore, self.activate = setup.restore, setup.activate
        # Commands to a server that has its part of the model.
        self.set_members, self.set_consistency = control.set_members, control.set_consistency
        self.cut, self.release = control.cut, control.release
        # A worker's steps.
        self.push, self.idle, self.steal = contributions.push, contributions.idle, contributions.steal
        self.pull, self.exchange = pulls.pull, pulls.exchange
        self.attach = Attaching(host, self).attach
        # What others read.
        self.stats, self.counted, self.ledger = facts.stats, facts.counted, facts.ledger
        self.export, self.copied = facts.export, facts.copied
        self.share_norms, self.probe_place = facts.share_norms, facts.probe_place
        # Copies of the shard.
        replicas = Replicas(host, self)
        self.set_holders, self.lend = replicas.set_holders, replicas.lend
        self.forward, self.forward_lent = replicas.forward, replicas.forward_lent
        self.made_lent, self.catch_up = replicas.made_lent, replicas.catch_up
        # Shards of a new plan.
        parts = PartsCalls(host)
        self.feed, self.catch_up_part, self.forward_part = parts.feed, parts.catch_up_part, parts.forward_part
        self.open_bulk = process.open_bulk
        self.collect = (collecting or Collecting(process)).collect

    def judge(self, method: Method, message: Message) -> None:
        """Raise an error if the caller of the present call may not say this; see `transport.security.members`."""
        self.host.process.judge(method, message)

    def report(self) -> shard_pb2.StatsResponse:
        """The report that the coordinator gets every now and then."""
        return self._facts.news()

    async def drop(self) -> None:
        """End the shard while the process goes on: calls that wait or come are told to try elsewhere."""
        await self.host.drop()

    async def leave(self) -> None:
        """The plan of this shard is not in force: end the shard and its threads while the process goes on."""
        await self.host.leave()
        self._pulls.close()

    async def close(self) -> None:
        """End the shard and its threads."""
        await self.host.close()
        self._pulls.close()


class ServerService:
    """All shards of a process, by number. A call goes to the shard to which it is addressed; see `addresses`.

    A call that is addressed to no shard goes to the first one. Lives in one event loop; :meth:`close` ends its threads.
    """

    def __init__(
        self,
        job: str,
        connect: Callable[[str], Channel],
        wait_timeout_s: float = 600.0,
        threads: int = 1,
        shares: bool = False,
    ) -> None:
        """``connect`` opens a channel to another server; ``wait_timeout_s`` bounds the wait for it.

        ``threads``: how many work on chunks side by side. ``shares``: memory is shared with backups on this host.
        """
        self.process = Process(job, connect, wait_timeout_s, threads, shares)
        self.process.drops = self._drop_former
        # By the number of the shard in its address.
        self.shards: dict[int, ShardService] = {}
        # Answers as long as there is no shard.
        # Process groups belong to no shard.
        self._collecting = Collecting(self.process)
        self._nothing = ShardService(self.process, collecting=self._collecting)
        for method in METHODS.values():
            if method.service == "Shard":
                setattr(self, method.handler, self._passed_on(method.handler))

    def _passed_on(self, handler: str) -> Callable[[Any], Any]:
        gives = handler in _GIVES
        return lambda argument: getattr(self._addressed(gives), handler)(argument)

    def _addressed(self, gives: bool) -> ShardService:
        number = addressed()
        if number is None:
            if gives:
                raise errors.ProtocolError("a shard is given to an address that names it")
            return self.first
        if number not in self.shards and gives:
            if number >= _NUMBERS:
                raise errors.ProtocolError(f"shard {number} of at most {_NUMBERS}")
            self.shards[number] = ShardService(self.process, plan_number(number), self._collecting)
        return self.shards.get(number, self._nothing)

    @property
    def first(self) -> ShardService:
        """The shard with the lowest number; one that holds nothing if there is none."""
        settled = self._settled()
        return settled[min(settled)] if settled else self._nothing

    def _settled(self) -> dict[int, ShardService]:
        """The shards without those of a plan that is still prepared, which are nobody's business."""
        return {number: one for number, one in self.shards.items() if plan_number(number) <= self.process.settled}

    def judge(self, method: Method, message: Message) -> None:
        """Raise an error if the caller of the present call may not say this; see `transport.security.members`."""
        self.process.judge(method, message)

    def version(self) -> int | None:
        """The version of the first shard; None if there is no shard."""
        shard = self.first.host.shard
        return shard.state.version if shard is not None else None

    @property
    def used_at(self) -> float:
        """When a worker was last heard of (monotonic seconds)."""
        return max(one.contributions.used_at for one in (self._nothing, *self.shards.values()))

    def reports(self) -> list[shard_pb2.StatsResponse]:
        """The reports that the coordinator gets every now and then: of all shards, or of none."""
        return [shard.report() for shard in self._settled().values()] or [self._nothing.report()]

    def holding(self) -> tuple[str, int]:
        """(layout, timeline) of the shards that this process holds; the layout is empty while it holds none."""
        shard = self.first.host.shard
        return (shard.digest, shard.config.timeline) if shard is not None else ("", 0)

    async def _drop_former(self, plan: int) -> None:
        """``plan`` is in force: drop the shards of other plans that are settled."""
        former = [n for n in self.shards if plan_number(n) != plan and plan_number(n) <= self.process.settled]
        for shard in [self.shards.pop(number) for number in former]:
            await shard.leave()

    async def drop(self) -> None:
        """Forget all shards, since other servers hold them: their memory is free, and they answer nobody any more."""
        dropped = list(self.shards.values())
        self.shards.clear()
        for shard in dropped:
            await shard.drop()

    async def close(self) -> None:
        """Answer everybody and end the threads."""
        self.process.fail("the server stops")
        for shard in (self._nothing, *self.shards.values()):
            await shard.close()
        self.process.close()
