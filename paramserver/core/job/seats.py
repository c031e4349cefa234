"""The seats of servers: for each server index one record, and the decisions that follow from it.

A seat is free, or a server sits there, or its server is away. A server that is away was given up for lost, and may come
back with its shard of the model. `Membership` knows the servers that are there, with their leases. `Seats` keeps the
servers that are away. All changes go through :meth:`Seats.handle`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paramserver.core.job.membership import Member, Membership, Presence, Role


@dataclass(frozen=True, slots=True)
class Away:
    """The record of a seat whose server is away. ``since``: the time of the loss."""

    member: Member
    since: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The job, as far as seats depend on it.

    ``servers``: the number of seats. ``layout``: digest of the model's layout; empty while no model is known.
    ``can_go_back``: a shard that is lost can be restored from a checkpoint. ``going_back``: this happens just now.
    ``over``: the job has ended or is about to end. ``covered``: other servers have taken over all shards of the server
    that is gone. ``spare``: the seats whose servers are the primary of no shard.
    """

    job: str
    servers: int
    layout: str = ""
    timeline: int = 0
    can_go_back: bool = False
    going_back: bool = False
    over: bool = False
    covered: bool = False
    spare: Collection[int] = ()


# ---- events


@dataclass(frozen=True, slots=True)
class Gone:
    """The server is a member no more. ``lost``: it did not say goodbye."""

    member: Member
    lost: bool
    reason: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Taken:
    """A server takes the seat. ``with_shard``: it has the shard with which it went away."""

    index: int
    with_shard: bool


Event = Gone | Taken


# ---- effects


@dataclass(frozen=True, slots=True)
class Missed:
    """The job waits for this server."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Back:
    """The seat whose server was away for ``after_s`` seconds has a server again."""

    name: str
    after_s: float
    with_shard: bool


@dataclass(frozen=True, slots=True)
class JobFails:
    """A shard is gone for good, so the job fails. Also an answer: the newcomer cannot help."""

    text: str


Effect = Missed | Back | JobFails


# ---- a newcomer, and the answers that it gets


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A server asks for a seat.

    ``wish``: the index that it wishes. ``holds``: digest of the layout of its shard, empty if it has no shard;
    ``timeline``: that of the shard. ``known``: the server was a member of this job before. ``replaces``: pids of the
    processes in whose place it comes.
    """

    wish: int | None
    incarnation: int
    holds: str = ""
    timeline: int = 0
    known: bool = False
    replaces: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """The newcomer gets the seat ``index``. ``goes_back``: the newcomer's part of the reason to go back; or empty."""

    index: int
    goes_back: str = ""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """A seat may soon be free."""

    text: str


@dataclass(frozen=True, slots=True)
class TooMany:
    """All seats are taken."""

    text: str


@dataclass(frozen=True, slots=True)
class Stranger:
    """The shard of the newcomer does not belong to this job, or is too old."""

    text: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Other servers hold the shards of the newcomer. It drops them, and asks again as a server without a shard."""

    text: str


Answer = Seat | Drop | TryAgain | TooMany | Stranger | JobFails


class Seats:
    """The seats of the servers of one job. Times are in seconds."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        # By index. No server of the membership has one of these indices.
        self._away: dict[int, Away] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event at ``now``; return the effects that the caller performs."""
        match event:
            case Gone():
                return self._gone(event, now)
            case Taken(index, with_shard):
                away = self._away.pop(index, None)
                return [Back(away.member.name, now - away.since, with_shard)] if away else []

    def _gone(self, event: Gone, now: float) -> list[Effect]:
        """Before there is a model, a server has no shard, and its seat is free for any other. So it is if backups have
        taken its place.
        """
        member, facts = event.member, event.facts
        if not facts.layout or facts.covered:
            return []
        if event.lost or (facts.can_go_back and not facts.over):
            self._away[member.index] = Away(member, now)
            return [Missed(member, event.reason)]
        if self._members.of(Role.WORKER):
            return [JobFails(f"{event.reason}; its shard of the model is gone")]
        return []

    # ---- questions

    def seat(self, index: int) -> Member | Away | None:
        """The record of a seat: the server that sits there; or that it is away; None if the seat is free."""
        there = next((server for server in self._members.of(Role.SERVER) if server.index == index), None)
        return there or self._away.get(index)

    @property
    def away(self) -> list[Away]:
        """The servers that are away, by index."""
        return [away for _, away in sorted(self._away.items())]

    @property
    def servers(self) -> list[Member]:
        """The servers that are there, and then those that are away."""
        return [*self._members.of(Role.SERVER), *(away.member for away in self.away)]

    def overdue(self, now: float, limit_s: float) -> Away | None:
        """The first server that has been away for longer than ``limit_s`` seconds."""
        return next((away for away in self.away if now - away.since > limit_s), None)

    def all_there(self, servers: int) -> bool:
        """Whether each of the ``servers`` seats has its server."""
        return not any(map(self._open, range(servers)))

    def place(self, newcomer: Newcomer, facts: Facts) -> Answer:
        """The seat that the newcomer gets, or why it gets none.

        A server that was cut off comes back with its shard, to its own seat. A server that begins anew in its place
        has no shard: the job goes back to a checkpoint, or fails if it cannot go back. In a seat whose shards other
        servers have taken over, nobody needs a shard.
        """
        if newcomer.holds:
            return self._with_shard(newcomer, facts)
        if (spare := self._spare(facts)) and (newcomer.wish in spare or not facts.can_go_back):
            return Seat(newcomer.wish if newcomer.wish in spare else spare[0])
        if self._away and facts.can_go_back:
            index = newcomer.wish if newcomer.wish in self._away else min(self._away)
            return Seat(index, goes_back="has begun anew")
        if self._away and facts.layout:
            gone = ", ".join(f"server-{index}" for index in sorted(self._away))
            return JobFails(
                f"a server has come without a shard in place of {gone}; that shard of the model is gone "
                "(set checkpoint.dir, so that the job can go back to a checkpoint)"
            )
        if len(self._members.of(Role.SERVER)) >= facts.servers:
            return self._full(newcomer, facts)
        free = [index for index in range(facts.servers) if self._open(index)]
        return Seat(newcomer.wish if newcomer.wish in free else free[0])

    def _with_shard(self, newcomer: Newcomer, facts: Facts) -> Answer:
        own = next((a.member for a in self.away if a.member.incarnation == newcomer.incarnation), None)
        older = newcomer.timeline != facts.timeline
        if own is None and newcomer.known and newcomer.holds == facts.layout and self._spare(facts):
            return Drop("this server was given up for lost, and other servers hold its shards: it drops them")
        if own is None or newcomer.holds != facts.layout or (older and not facts.going_back):
            return Stranger(f"this server holds a shard of an earlier run of job {facts.job!r}: restart it")
        return Seat(own.index, goes_back="came back from an older timeline" if older else "")

    def _spare(self, facts: Facts) -> list[int]:
        """The free seats in which nobody needs a shard."""
        return [index for index in sorted(facts.spare) if index < facts.servers and self.seat(index) is None]

    def _full(self, newcomer: Newcomer, facts: Facts) -> Answer:
        servers = self._members.of(Role.SERVER)
        ending = [m.name for m in servers if m.presence is Presence.SILENT or m.pid in newcomer.replaces]
        if ending:
            return TryAgain(
                f"job {facts.job!r} has its {facts.servers} servers, but {', '.join(ending)} is not heard of just "
                f"now: a place is free within {self._members.lease_s:g} s (cluster.lease_s), unless it comes back"
            )
        return TooMany(
            f"job {facts.job!r} already has its {facts.servers} servers; raise cluster.servers to start with "
            "more, or call paramserver scale servers=N first if it trains"
        )

    def _open(self, index: int) -> bool:
        """Whether no server sits there."""
        return not isinstance(self.seat(index), Member)
