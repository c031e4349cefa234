"""A change of the number of servers: wished, prepared, then in force or given up. One change at a time.

While a change is prepared, the former shards have everything, and the job can go on with them at any moment. The change
is in force when the record of the job says so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paramserver.core.layout.plan import MAX_SHARDS

_LARGEST_PLAN = (1 << 31) // MAX_SHARDS - 1


class Stage(enum.Enum):
    """The stage of the present change."""

    NONE = "no change"
    # Servers are missing for it.
    WAITS = "waits for servers"
    # New shards are filled.
    PREPARES = "prepares"


@dataclass(frozen=True, slots=True)
class Facts:
    """The job, as far as a change of the number of servers depends on it.

    ``missing``: servers of the job that are not there, in words. ``leaves``: a server that was asked to leave.
    ``busy``: what else is under way, in words. ``split``: servers beside workers take another part than the others.
    """

    servers: int
    replicas: int
    most: int
    missing: str = ""
    leaves: str = ""
    busy: str = ""
    split: bool = False


def refusal(servers: int, facts: Facts) -> str:
    """Why the job cannot have so many servers now; empty if it can."""
    if not 1 <= servers <= facts.most:
        return f"a job has 1 to {facts.most} servers, not {servers}"
    if servers <= facts.replicas:
        return (
            f"each part of the model is on {facts.replicas + 1} servers (cluster.replicas is {facts.replicas}), so "
            f"{servers} cannot hold it"
        )
    if facts.busy:
        return f"{facts.busy} just now: try again when that is done"
    if facts.leaves:
        return f"{facts.leaves} was asked to leave: start it again first"
    if facts.missing:
        return f"{facts.missing} is not there: start it again first"
    if facts.split:
        return (
            "servers beside workers hold another part of the model than the others (cluster.placement), so their "
            "number is fixed"
        )
    return ""


class Resizing:
    """The changes of one job. ``servers``: how many servers hold the model now."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.stage = Stage.NONE
        # The number of servers that the job is to have: ``servers``, unless a change is under way.
        self.wanted = servers
        # The number of the plan in force, and of the newest plan that was ever prepared.
        self.plan = self.newest_plan = 0

    @property
    def under_way(self) -> bool:
        """Whether a change is wished for, and neither in force nor given up."""
        return self.stage is not Stage.NONE

    @property
    def seats(self) -> int:
        """For how many servers there is a place in the job."""
        return max(self.servers, self.wanted)

    @property
    def settled(self) -> int:
        """The newest plan that is in force or was given up."""
        return self.newest_plan - (self.stage is Stage.PREPARES)

    def wish(self, servers: int) -> None:
        """So many servers are wished for; :func:`refusal` has nothing against it."""
        assert not self.under_way, "one change at a time"
        self.wanted, self.stage = servers, Stage.WAITS

    def prepare(self) -> int:
        """All servers are there: begin to fill the shards of a new plan, and return its number."""
        assert self.stage is Stage.WAITS, self.stage
        assert self.newest_plan < _LARGEST_PLAN, "the numbers of plans are used up"
        self.newest_plan += 1
        self.stage = Stage.PREPARES
        return self.newest_plan

    def commit(self) -> None:
        """All new shards have everything: the new plan is in force."""
        assert self.stage is Stage.PREPARES, self.stage
        self.servers, self.plan, self.stage = self.wanted, self.newest_plan, Stage.NONE

    def undo(self) -> None:
        """The change is given up: the job goes on with the former shards."""
        self.wanted, self.stage = self.servers, Stage.NONE

    def restore(self, servers: int, plan: int, newest_plan: int) -> None:
        """Go on from the record of an earlier coordinator. A change that was under way is given up."""
        self.servers = self.wanted = servers
        self.plan, self.newest_plan, self.stage = plan, newest_plan, Stage.NONE
