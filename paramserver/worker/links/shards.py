"""The shards of a job, as a worker sees them: the parts that talk to all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paramserver.core.layout.plan import Plan
from paramserver.transport.base import Channel
from paramserver.worker.gradients.flow_control import FlowControl
from paramserver.worker.links.near import Near
from paramserver.worker.links.pulls import Pulls
from paramserver.worker.links.pushes import Pushes
from paramserver.worker.links.questions import Questions
from paramserver.worker.links.states import States
from paramserver.worker.links.targets import Targets

if TYPE_CHECKING:
    from paramserver.compress.casts import Cast


class ShardLinks:
    """Pushes, pulls, questions, with retries, back-off and a deadline; on one timeline of the job.

    ``names``: by shard, the name of its server. ``worker`` tells this worker's present member number, 0 for a process
    that is no member. ``rounding``: the type that weights are rounded to on their way here.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        names: Sequence[str],
        plan: Plan,
        job: str,
        worker: Callable[[], int],
        timeline: int = 0,
        rounding: Cast | None = None,
        wait_timeout_s: float = 600.0,
        log_interval_s: float = 5.0,
    ) -> None:
        self._targets = Targets(channels, names, plan, job, worker, timeline, wait_timeout_s, log_interval_s)
        # By shard, the channel to it, and the name of its server.
        self.channels, self.names = self._targets.channels, self._targets.names
        flow_control = FlowControl(len(channels), plan.layout.chunk_bytes)
        self.plan = plan
        self.timeline = timeline
        self.near = Near(self._targets)
        self.pulls = Pulls(self._targets, self.near, flow_control, rounding)
        self.pushes = Pushes(self._targets, self.near, flow_control)
        self.questions = Questions(self._targets, self.near)
        self.states = States(self._targets)

    async def close(self) -> None:
        """Close the channels."""
        self.pulls.close()
        await self.near.close()
        await self._targets.close()
