"""The place of one shard in a server process: the shard that is there at present."""

from __future__ import annotations

from paramserver import errors
from paramserver.server.replicas.parts import Parts
from paramserver.server.rpc.process import Process
from paramserver.server.running import RunningShard


class Host:
    """The parts that answer calls to one shard find it here."""

    def __init__(self, process: Process, plan: int = 0) -> None:
        """``plan``: the number of the plan to which the shard belongs."""
        self.process, self.plan = process, plan
        # The plan is a former one, so that no shard belongs here any more.
        self.left = False
        # The shard of the present timeline; None until the coordinator has configured one.
        self.shard: RunningShard | None = None
        # Of a plan that is prepared: what former shards bring ahead.
        self.parts: Parts | None = None
        process.at_the_end(self._end)

    async def replace(self, made: RunningShard) -> None:
        """Serve another shard from now on; the former one ends."""
        former, self.shard = self.shard, made
        self.brings(None)
        if former is not None:
            if former.config.timeline == made.config.timeline:
                former.end(errors.UnavailableError("this server is not the primary of the shard any more: try again"))
            former.end(errors.RolledBackError(f"this server is on timeline {made.config.timeline} now"))
            await former.close()

    def brings(self, parts: Parts | None) -> None:
        """Former shards bring these parts from now on, and no others."""
        former, self.parts = self.parts, parts
        if former is not None:
            former.close()

    async def drop(self) -> None:
        """Serve no shard any more: other servers hold it."""
        self.brings(None)
        former, self.shard = self.shard, None
        if former is not None:
            former.end(errors.UnavailableError("other servers hold the shard now: try again"))
            await former.close()

    async def leave(self) -> None:
        """The plan of this shard is not in force: serve no shard here from now on."""
        self.left = True
        self.process.forget(self._end)
        await self.drop()

    def _end(self) -> None:
        if self.shard is not None:
            self.shard.end(errors.JobFailedError(self.process.failure))

    async def close(self) -> None:
        """End the shard; the process has failed or stops."""
        self.brings(None)
        if self.shard is not None:
            await self.shard.close()

    def ready(self, active: bool = True, primary: bool = True) -> RunningShard:
        """The present shard; ``active``: one that has published a version; ``primary``: one that is no backup.

        Raises JobFailedError, and UnavailableError while there is no such shard.
        """
        if self.process.failure:
            raise errors.JobFailedError(self.process.failure)
        if self.shard is None:
            raise errors.UnavailableError("this server has not been told its part of a model yet: try again")
        if primary and self.shard.state.backup:
            raise errors.UnavailableError(
                "this server is a backup of the shard, and its primary is another one: try again"
            )
        if active and not self.shard.state.active:
            raise errors.UnavailableError("version 0 is not published yet: try again")
        return self.shard

    def on(self, timeline: int) -> RunningShard:
        """The present shard. Raises RolledBackError if it is on another timeline, and what :meth:`ready` raises."""
        shard = self.ready()
        if timeline != shard.config.timeline:
            raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}, not {timeline}")
        return shard
