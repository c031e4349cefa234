"""One server behind its RPCs: the parts that answer, and which part answers which call."""

from __future__ import annotations

from collections.abc import Callable

from paramserver.server.rpc.attaching import Attaching
from paramserver.server.rpc.contributions import Contributions
from paramserver.server.rpc.control import Control
from paramserver.server.rpc.facts import Facts
from paramserver.server.rpc.host import Host
from paramserver.server.rpc.pulls import Pulls
from paramserver.server.rpc.setup import Setup
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2


class ShardService:
    """Lives in one event loop; :meth:`close` ends its threads. Its attributes named like RPCs are the RPCs."""

    def __init__(
        self, job: str, connect: Callable[[str], Channel], wait_timeout_s: float = 600.0, threads: int = 1
    ) -> None:
        """``connect`` opens a channel to another server; ``wait_timeout_s`` bounds the wait for it.

        ``threads``: how many work on chunks side by side.
        """
        self.host = host = Host(job)
        self._setup = setup = Setup(host, connect, wait_timeout_s, threads)
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

    def becomes_member(self, incarnation: int, news: Callable[[], None]) -> None:
        """``incarnation`` goes into reports; ``news`` is called when a report should not wait for the regular one."""
        self._facts.incarnation, self._setup.news = incarnation, news

    def report(self) -> shard_pb2.StatsResponse:
        """The report that the coordinator gets every now and then."""
        return self._facts.report()

    def holding(self) -> tuple[str, int]:
        """(layout, timeline) of the shard that this process holds; the layout is empty while it holds none."""
        shard = self.host.shard
        return (shard.digest, shard.config.timeline) if shard is not None else ("", 0)

    async def close(self) -> None:
        """Answer everybody and end the threads."""
        await self.host.close()
        self._setup.close()
        self._pulls.close()
