"""The shards of a job, as a worker sees them: the parts that talk to all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paramserver.core.layout.plan import moving_bytes
from paramserver.transport.base import Channel
from paramserver.worker.gradients.flow_control import FlowControl
from paramserver.worker.host import tier
from paramserver.worker.host.tier import HostTier, name_of
from paramserver.worker.links.near import Near
from paramserver.worker.links.pulls import Pulls
from paramserver.worker.links.pushes import Pushes
from paramserver.worker.links.questions import Questions
from paramserver.worker.links.rounds import Rounds
from paramserver.worker.links.states import States
from paramserver.worker.links.targets import Targets

if TYPE_CHECKING:
    from paramserver.compress.casts import Cast
    from paramserver.worker.memory.inbox import Inbox


class ShardLinks:
    """Pushes, pulls, questions, with retries, back-off and a deadline; on one timeline of the job.

    ``rounding``: the type that weights are rounded to on their way here.
    """

    def __init__(self, targets: Targets, rounding: Cast | None = None) -> None:
        self._targets = targets
        # By shard, the channel to it, and the name of its server.
        self.channels, self.names = targets.channels, targets.names
        self.plan, self.timeline, self.trace = targets.plan, targets.timeline, targets.trace
        flow_control = FlowControl(len(targets), targets.plan.layout.chunk_bytes)
        self.near = Near(targets)
        self.questions = Questions(targets, self.near)
        self.pulls = Pulls(targets, self.near, self.questions, flow_control, rounding)
        self.pushes = Pushes(targets, self.near, flow_control)
        self.states = States(targets)
        self.rounds = Rounds(targets)
        # The one pull and push of this host; None where each worker pulls and pushes by itself.
        self.host: HostTier | None = None

    def share_pulls(self, secret: str) -> None:
        """Pull and push once for all workers of this host that have this secret.

        Not if weights are few, or do not come as they are.
        """
        much = moving_bytes(self.plan.layout.chunks) >= tier.LEAST_BYTES
        if much and self.near.shared is None and self.pulls.rounding is None:
            targets = self._targets
            name = name_of(secret, targets.job, targets.timeline, targets.plan)
            self.host = HostTier(targets.plan, name, self.pulls.for_host, self.pushes.by_itself)
            self.pulls.host = self.pushes.host = self.host
            targets.beside(self.host.run())

    @property
    def inbox(self) -> Inbox | None:
        """Memory in which others on this host read what this worker contributes; None: nobody reads there."""
        if self.near.shared is not None:
            return self.near.shared.inbox
        return self.host.inbox if self.host is not None else None

    async def move(self, shard: int, channel: Channel, name: str) -> None:
        """Another server, called ``name``, has this shard from now on: ``channel`` leads to it.

        Calls under way are made again there. The server is told what the former one knew and it may not know.
        """
        self._targets.move(shard, channel, name)
        self.pushes.moved(shard)
        self.rounds.moved(shard)
        self.questions.moved(shard)
        await self.near.moved(shard)

    async def close(self) -> None:
        """Close the channels."""
        self.pulls.close()
        self.host = self.pulls.host = self.pushes.host = None
        await self.near.close()
        await self._targets.close()
