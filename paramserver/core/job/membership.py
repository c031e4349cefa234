"""The members of a job: their leases, names and ranks, and the generation, which rises with every change of members."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


class Role(enum.Enum):
    """The role of a process in the job. Observers only read; they are members of no generation."""

    WORKER = "worker"
    SERVER = "server"
    OBSERVER = "observer"


class Presence(enum.Enum):
    """Connected; or silent: without a session, while its lease still lasts."""

    CONNECTED = "connected"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Member:
    """One process. ``ident`` is never used again; ``index`` is the rank of a worker or the number of a server."""

    ident: int
    role: Role
    index: int
    name: str
    expires_at: float
    presence: Presence = Presence.SILENT
    address: str = ""
    pid: int = 0
    # Chosen by the process itself: a process that began anew has another number than one that was cut off.
    incarnation: int = 0
    # A server that shares its link with a worker.
    beside_worker: bool = False
    # Starts the process again, for people.
    restart_command: str = ""
    # Where the process serves metrics about itself; empty: nowhere.
    metrics_url: str = ""
    # Of a worker: a word that is equal on one host; empty: not known.
    host: str = ""
    # What tells the process from others; and of a server, what the coordinator shows in calls to it.
    proof: bytes = b""
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """A process asks to become a member. ``index``: the index that it wishes, if free."""

    role: Role
    index: int | None = None
    address: str = ""
    pid: int = 0
    incarnation: int = 0
    beside_worker: bool = False
    # Starts the process again, for people.
    restart_command: str = ""
    # Where the process serves metrics about itself; empty: nowhere.
    metrics_url: str = ""
    # Of a worker: a word that is equal on one host; empty: not known.
    host: str = ""
    proof: bytes = b""
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Renewed:
    """A sign of life. ``key``: of a server that says which key it has; empty: nothing new."""

    ident: int
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session of the member broke. It has ``grace_s`` to come back."""

    ident: int


@dataclass(frozen=True, slots=True)
class Left:
    """The member leaves and has said so."""

    ident: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of the member has ended without a goodbye."""

    ident: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``stalled_s``: for so long of it this coordinator could not hear members."""

    stalled_s: float = 0.0


Event = Joined | Renewed | Disconnected | Left | Ended | Tick


@dataclass(frozen=True, slots=True)
class Admitted:
    """The newcomer is a member under this name."""

    member: Member


@dataclass(frozen=True, slots=True)
class Removed:
    """The process is no longer a member. ``lost``: it ended without saying goodbye."""

    member: Member
    lost: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationRose:
    """All members are to hear of the new membership."""

    generation: int
    reason: str


Effect = Admitted | Removed | GenerationRose


class Membership:
    """The members of one job. All changes go through :meth:`handle`; time is an argument, in seconds."""

    def __init__(self, lease_s: float, grace_s: float, generation: int = 0, next_ident: int = 1) -> None:
        if lease_s <= 0 or grace_s <= 0:
            raise ValueError(f"lease_s ({lease_s}) and grace_s ({grace_s}) must be above 0")
        self.lease_s, self.grace_s = lease_s, grace_s
        self.generation = generation
        # The number of the next member.
        self.next_ident = next_ident
        self._members: dict[int, Member] = {}

    def restore(self, members: Iterable[Member], expires_at: float) -> None:
        """Begin with the members of an earlier coordinator. They have until ``expires_at`` to say that they live."""
        for member in members:
            self._members[member.ident] = replace(member, expires_at=expires_at, presence=Presence.SILENT)
            self.next_ident = max(self.next_ident, member.ident + 1)

    def silent_s(self, ident: int, now: float) -> float:
        """Seconds since this member, which has a session, was heard of."""
        return max(0.0, now - (self._members[ident].expires_at - self.lease_s))

    def forget(self, ident: int) -> None:
        """Remove a member without an effect for other members."""
        self._members.pop(ident, None)

    def __contains__(self, ident: int) -> bool:
        return ident in self._members

    def get(self, ident: int) -> Member | None:
        """The member of this number, or None."""
        return self._members.get(ident)

    def of(self, role: Role) -> list[Member]:
        """The members in a role, by index."""
        return sorted((m for m in self._members.values() if m.role is role), key=lambda m: m.index)

    def empty_seats(self, role: Role, wanted: int) -> list[str]:
        """The names of members of this role that are not there, of ``wanted``."""
        have = {member.index for member in self.of(role)}
        return [f"{role.value}-{index}" for index in range(wanted) if index not in have]

    def missing(self, servers: int, workers: int) -> str:
        """Which members are not there, of so many ``servers`` and ``workers``, in words; empty if all are there."""
        parts = []
        for role, wanted in ((Role.SERVER, servers), (Role.WORKER, workers)):
            present = len(self.of(role))
            if present < wanted:
                names = self.empty_seats(role, wanted)
                parts.append(f"{present}/{wanted} {role.value}s; missing: {', '.join(names[:8])}")
        return "; ".join(parts)

    def by_place(self) -> list[Member]:
        """The workers in the order in which slices are dealt out: by rank, but workers of one host side by side.

        So the slices of a host are neighbours in the reduction tree, and can be added up there.
        """
        workers = self.of(Role.WORKER)
        first: dict[str, int] = {}
        for worker in workers:
            if worker.host:
                first.setdefault(worker.host, worker.index)
        return sorted(workers, key=lambda worker: (first.get(worker.host, worker.index), worker.index))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event at ``now``; return the effects that the caller performs."""
        match event:
            case Joined():
                return self._join(event, now)
            case Renewed(ident, key):
                if member := self._members.get(ident):
                    self._members[ident] = replace(
                        member,
                        expires_at=now + self.lease_s,
                        presence=Presence.CONNECTED,
                        key=key or member.key,
                    )
                return []
            case Disconnected(ident):
                if member := self._members.get(ident):
                    soon = min(member.expires_at, now + self.grace_s)
                    self._members[ident] = replace(member, expires_at=soon, presence=Presence.SILENT)
                return []
            case Left(ident):
                member = self._members.get(ident)
                return self._remove([(member, False, f"{member.name} left")]) if member else []
            case Ended(ident):
                member = self._members.get(ident)
                return self._remove([(member, True, f"{member.name} has ended")]) if member else []
            case Tick(stalled_s):
                if stalled_s > 0:
                    self._prolong(stalled_s)
                return self._remove(
                    [
                        (m, True, f"{m.name} was not heard of until its lease ended")
                        for m in list(self._members.values())
                        if m.expires_at <= now
                    ]
                )

    def _prolong(self, seconds: float) -> None:
        """Signs of life that have come meanwhile are still unread: no lease ends for that reason."""
        for member in self._members.values():
            self._members[member.ident] = replace(member, expires_at=member.expires_at + seconds)

    def _join(self, event: Joined, now: float) -> list[Effect]:
        taken = {member.index for member in self._members.values() if member.role is event.role}
        wish = event.index if event.index is not None and event.index not in taken else None
        index = wish if wish is not None else next(i for i in range(len(taken) + 1) if i not in taken)
        member = Member(
            ident=self.next_ident,
            role=event.role,
            index=index,
            name=f"{event.role.value}-{index}",
            expires_at=now + self.lease_s,
            address=event.address,
            pid=event.pid,
            incarnation=event.incarnation,
            beside_worker=event.beside_worker,
            restart_command=event.restart_command,
            metrics_url=event.metrics_url,
            host=event.host,
            proof=event.proof,
            key=event.key,
        )
        self.next_ident += 1
        self._members[member.ident] = member
        return [Admitted(member), *self._rise([member], f"{member.name} joined")]

    def _remove(self, leaving: list[tuple[Member, bool, str]]) -> list[Effect]:
        for member, _, _ in leaving:
            del self._members[member.ident]
        removed: list[Effect] = [Removed(member, lost, reason) for member, lost, reason in leaving]
        reasons = "; ".join(reason for _, _, reason in leaving)
        return removed + self._rise([member for member, _, _ in leaving], reasons)

    def _rise(self, changed: Iterable[Member], reason: str) -> list[Effect]:
        if all(member.role is Role.OBSERVER for member in changed):
            return []
        self.generation += 1
        return [GenerationRose(self.generation, reason)]
