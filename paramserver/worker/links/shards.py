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
from paramserver.worker.links.servers import Servers
from paramserver.worker.links.states import States

if TYPE_CHECKING:
    from paramserver.compress.casts import Cast


class ShardLinks:
    """Pushes, pulls, questions, with retries, back-off and a deadline; on one timeline of the job.

    ``worker`` tells this worker's present member number, 0 for a process that is no member. ``rounding``: the type that
    weights are rounded to on their way here.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        plan: Plan,
        job: str,
        worker: Callable[[], int],
        timeline: int = 0,
        rounding: Cast | None = None,
        wait_timeout_s: float = 600.0,
        log_interval_s: float = 5.0,
    ) -> None:
        self._servers = Servers(channels, plan, job, worker, timeline, wait_timeout_s, log_interval_s)
        # By server, the channel to it.
        self.channels = self._servers.channels
        flow_control = FlowControl(len(channels), plan.layout.chunk_bytes)
        self.plan = plan
        self.timeline = timeline
        self.near = Near(self._servers)
        self.pulls = Pulls(self._servers, self.near, flow_control, rounding)
        self.pushes = Pushes(self._servers, self.near, flow_control)
        self.questions = Questions(self._servers, self.near)
        self.states = States(self._servers)

    async def close(self) -> None:
        """Close the channels."""
        self.pulls.close()
        await self.near.close()
        await self._servers.close()
