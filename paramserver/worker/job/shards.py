"""The job's model and plan, and the links to the shards as they are on the present timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paramserver.compress.casts import Cast
from paramserver.core.layout.plan import Plan, make_plan
from paramserver.transport.base import Channel
from paramserver.v1 import types_pb2
from paramserver.worker import startup
from paramserver.worker.job.member import Member
from paramserver.worker.job.moves import Moves
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.targets import Targets

Connect = Callable[[str], Channel]


class Shards:
    """``connect`` opens a channel to a server's address.

    ``transport``: "shm": share memory with all servers, "auto": with those on this host, else with none.
    ``host_secret``: known to the workers of the job, which pull once for each host; None: each pulls by itself.
    """

    def __init__(self, member: Member, connect: Connect, transport: str, host_secret: str | None = None) -> None:
        self.transport, self._host_secret = transport, host_secret
        self._member, self._connect = member, connect
        # Exists after a model was registered.
        self.plan: Plan
        self._links: ShardLinks | None = None
        # Follows shards that move, while there are links.
        self._following: asyncio.Task[None] | None = None
        # The type that weights are rounded to on their way here.
        self.rounding: Cast | None = None

    def round_to(self, rounding: Cast | None) -> None:
        """Before there is a model: weights are rounded to this type on their way here."""
        self.rounding = rounding

    def use(self, plan: Plan) -> None:
        """A model is registered, and this is its plan."""
        self.plan = plan

    @property
    def links(self) -> ShardLinks:
        """Exist after a model was registered."""
        assert self._links is not None, "register a model first"
        return self._links

    @property
    def met(self) -> ShardLinks | None:
        """The links, None before a model was registered."""
        return self._links

    @property
    def timeline(self) -> int:
        """The timeline of the links; 0 before there are any."""
        return self._links.timeline if self._links is not None else 0

    async def connect(self) -> ShardLinks:
        """Connect to the present servers, and share memory with them; former links are closed.

        Raises RolledBackError if the job goes back meanwhile.
        """
        member, session, former = self._member, self._member.session, self.plan
        await self.close()
        view = await session.wait_until(
            lambda view: (
                len(view.shards) >= (view.shard_count or former.shards) and view.state != types_pb2.JOB_STATE_RECOVERING
            ),
            lambda view: view.reason or "servers",
            session.options.join_timeout_s,
        )
        if view.shard_count not in (0, former.shards):  # the number of servers has changed
            self.plan = make_plan(former.layout, view.shard_count)
        plan = self.plan
        shards = sorted(view.shards, key=lambda shard: shard.index)
        targets = Targets(
            [self._connect(shard.address) for shard in shards],
            [shard.server for shard in shards],
            plan,
            session.job,
            lambda: member.session.member,
            view.timeline,
            member.wait_timeout_s,
            session.options.log_interval_s,
            member.trace,
        )
        self._links = links = ShardLinks(targets, self.rounding)
        member.follows(links.timeline)
        self._following = asyncio.ensure_future(Moves(member, links, self._connect, view).follow())
        # An observer needs no memory of its own.
        worker = session.options.role == types_pb2.ROLE_WORKER
        await startup.share_memory(session, links, plan, self.transport if worker else "grpc")
        if worker and self._host_secret is not None:
            links.share_pulls(self._host_secret)
        return links

    async def close(self) -> None:
        """Close the links, if there are any."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if self._links is not None:
            await self._links.close()
