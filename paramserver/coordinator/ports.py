"""Narrow views of a job. A part names the views that it uses. It never imports `Job`, which holds all parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from paramserver.checkpoint.place import Place
from paramserver.coordinator.changes import Changes
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.tasks import Tasks
from paramserver.core.job.holders import Holders
from paramserver.core.job.life import Life
from paramserver.core.job.membership import Membership
from paramserver.core.job.seats import Seats
from paramserver.core.versions.consistency import Consistency
from paramserver.v1 import shard_pb2, types_pb2

M = TypeVar("M", bound=Message)


class Stage(Protocol):
    """Where the job stands, its members, waiting for changes, and tasks beside the calls of members."""

    options: JobOptions
    members: Membership
    seats: Seats
    changes: Changes
    tasks: Tasks
    life: Life

    @property
    def reason(self) -> str:
        """The reason for the phase, in words."""

    @property
    def timeline(self) -> int:
        """The number of the timeline."""

    @property
    def consistency(self) -> Consistency:
        """The setting that all shards have."""

    async def refresh(self) -> None:
        """Work out where the job stands, write it down, and tell all members."""


class Course(Protocol):
    """The change of mode begins anew, for parts that move the job to another timeline."""

    def reopen_mode_change(self) -> None:
        """Mode and staleness can be changed again, on the present timeline."""


class KeepingRegistered(Protocol):
    """The state of objects that scripts have registered."""

    async def save(self, place: Place, timeline: int, version: int) -> None:
        """Write the state that belongs to the checkpoint of this version, if there is one. Raises CheckpointError."""

    def named(self, version: int) -> None:
        """Servers are told to copy this version."""


class Holding(Protocol):
    """The servers that hold the shards."""

    @property
    def holders(self) -> Holders:
        """By shard, its primary."""


class Shards(Protocol):
    """All shards of the job; see `coordinator.leadership.cluster.Shards`."""

    def infos(self) -> list[types_pb2.ShardInfo]:
        """The shards whose primary is there, by index."""

    async def ask(
        self,
        method: str,
        request: Message | Callable[[int], Message],
        reply: type[M],
        timeout_s: float | None = None,
        present: bool = False,
    ) -> list[M]:
        """Call all shards at once, or those whose primary is ``present``."""

    async def stats(self) -> list[shard_pb2.StatsResponse]:
        """Ask all shards how they stand."""


class Commands(Protocol):
    """Commands to all shards, and the numbers that each command carries."""

    options: JobOptions
    term: int

    @property
    def timeline(self) -> int:
        """The number of the timeline."""

    @property
    def shards(self) -> Shards:
        """All shards, each at its primary."""


class Ends(Protocol):
    """Ends of a job that a part may have to bring about."""

    async def fail(self, reason: str, exit_code: int = 1) -> None:
        """End the job as failed."""

    async def replaced(self, reason: str) -> None:
        """Step down, since another coordinator leads the job."""


class Replicating(Protocol):
    """Backups of the shards; see `coordinator.work.replication`."""

    def pause(self, stay: bool) -> None:
        """Another timeline begins: no backup counts any more. ``stay``: primaries stay where they are."""

    def begin(self) -> None:
        """All primaries have published a version: make backups of all shards."""

    def look(self) -> None:
        """Tell servers in the background what they lack of the newest placement."""

    async def all_whole(self) -> None:
        """Wait until each backup has all of its shard, or is gone."""


class Resizing(Protocol):
    """Another number of servers; see `coordinator.work.resizing`."""

    @property
    def under_way(self) -> bool:
        """Whether a change is under way."""

    @property
    def plan(self) -> int:
        """The number of the plan in force."""

    @property
    def settled(self) -> int:
        """The newest plan that is in force or was given up."""

    def abandon(self) -> None:
        """The job goes back: a change that is under way is given up."""


class GoingBack(Protocol):
    """Going back to a checkpoint; see `coordinator.history.recovery`."""

    @property
    def under_way(self) -> bool:
        """Whether the job is going back just now."""

    @property
    def resuming(self) -> bool:
        """Whether a new job is about to go on from a checkpoint."""

    @property
    def possible(self) -> bool:
        """Whether there is anything to go back to, should a shard be lost."""

    def begin(self, reason: str) -> None:
        """Go back, since a shard is gone."""
