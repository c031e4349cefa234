"""Follows the shards of a timeline to other servers, as the coordinator's views tell. Runs in the background loop."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from paramserver import errors
from paramserver.transport.base import Channel
from paramserver.v1 import types_pb2
from paramserver.worker.job.member import Member
from paramserver.worker.links import ShardLinks

log = structlog.get_logger("paramserver.worker")


class Moves:
    """``view``: the view that ``links`` were made from. ``connect`` opens a channel to the address of a shard."""

    def __init__(
        self, member: Member, links: ShardLinks, connect: Callable[[str], Channel], view: types_pb2.View
    ) -> None:
        self._member, self._links, self._connect = member, links, connect
        self._placement = view.placement
        # By shard, its address.
        self._addresses = {shard.index: shard.address for shard in view.shards}

    async def follow(self) -> None:
        """Move shards whose address has changed, until this task is cancelled."""
        while True:
            session = self._member.session  # another one after an observer has become a worker
            seen = session.editions
            try:
                await self._look(session.view)
            except Exception:  # the top of a task: the calls to this shard end with their own errors
                log.exception("a shard that has moved could not be followed")
            if self._member.session is session:
                await session.changed(seen)

    async def _look(self, view: types_pb2.View) -> None:
        """Move the shards that a view names at another address; a shard without a server stays where it was."""
        if view.timeline != self._links.timeline or view.placement <= self._placement:
            return
        self._placement = view.placement
        for shard in view.shards:
            if shard.address == self._addresses.get(shard.index):
                continue
            try:
                channel = self._connect(shard.address)
            except errors.ParamServerError as error:
                log.error("a shard has moved, but its server cannot be reached", shard=shard.index, reason=str(error))
                continue
            log.info("a shard has moved", shard=shard.index, server=shard.server, placement=view.placement)
            self._addresses[shard.index] = shard.address
            await self._links.move(shard.index, channel, shard.server)
