"""The pure cores of a coordinator: members, leases of slices, the watchdog. Says in words what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from paramserver.core.job.membership import (
    Admitted,
    Event,
    GenerationRose,
    Joined,
    Membership,
    Presence,
    Removed,
    Role,
)
from paramserver.core.job.watchdog import Sight, Watchdog
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import SliceLeases
from paramserver.core.work.slices import SyncSchedule

LEASE_S, GRACE_S = 10.0, 2.0
# Members need so long to find another coordinator.
_FIND_S = 20.0


class Coordinator:
    """One coordinator. ``rose``: called when all are to be told who is a member now."""

    def __init__(self, who: dict[int, str], say: Callable[[str], None], rose: Callable[[], None]) -> None:
        self.members = Membership(LEASE_S, GRACE_S)
        self.schedule: SyncSchedule | None = None
        self.leases: SliceLeases | None = None
        self.timeline = 0
        self._watchdog = Watchdog()
        self._who = who
        self._say = say
        self._rose = rose
        self._gone: list[str] = []

    def take_over(self, before: Coordinator, generation: int, now: float) -> None:
        """Begin with the record of the coordinator before this one; ``generation``: the highest that a server knows."""
        record = before.members
        self.members = Membership(LEASE_S, GRACE_S, max(record.generation, generation) + 1, record.next_ident)
        self.members.restore([*record.of(Role.SERVER), *record.of(Role.WORKER)], now + LEASE_S + _FIND_S)
        self.timeline, self.schedule = before.timeline, before.schedule
        self._rose()

    def handle(self, event: Event, now: float) -> None:
        """Feed one event to the membership, and perform what follows."""
        rose = False
        for effect in self.members.handle(event, now):
            match effect:
                case Admitted(member):
                    self._who[member.ident] = member.name
                    self._say(f"coordinator: {member.name} is member {member.ident}")
                case Removed(member, lost, _):
                    self._say(f"coordinator: {member.name} is {'lost' if lost else 'gone'}")
                    self._gone.append(member.name)
                    self._take_back(member.ident)
                case GenerationRose(generation, reason):
                    self._say(f"coordinator: generation {generation}, since {reason}")
                    rose = True
        if rose:
            self._rose()

    def join(self, role: Role, index: int | None, now: float) -> None:
        """A process joins; a server gets its index back if it is free."""
        self.handle(Joined(role, index), now)
        self._gone = [name for name in self._gone if name not in self.names(role)]

    def workers(self) -> frozenset[int]:
        """The numbers of the workers that are members."""
        return frozenset(member.ident for member in self.members.of(Role.WORKER))

    def names(self, role: Role) -> list[str]:
        """The names of the members in a role."""
        return [member.name for member in self.members.of(role)]

    # ---- leases of slices, in asynchronous mode

    def lease(self, worker: int, want: int, max_epoch: int) -> None:
        assert self.leases is not None, "the job is synchronous"
        names = self.leases.lease(worker, max_epoch, want, len(self.workers()))
        self._say(f"coordinator -> {self._who[worker]}: {_listed(names) if names else 'no slice for now'}")

    def done(self, worker: int, names: Iterable[AsyncName]) -> None:
        assert self.leases is not None, "the job is synchronous"
        self._say(f"{self._who[worker]} -> coordinator: all servers have {_listed(names)}")
        self.leases.complete(names)

    def holding(self, worker: int, names: Iterable[AsyncName]) -> None:
        """A worker says which slices it holds; it is taken at its word."""
        assert self.leases is not None, "the job is synchronous"
        self._say(f"{self._who[worker]} -> coordinator: holds {_listed(names) if names else 'nothing'}")
        if self.leases.reconcile(worker, names):
            self._say("coordinator: other slices that were leased to it come back")

    def _take_back(self, worker: int) -> None:
        if self.leases is not None and (names := self.leases.give_back(worker)):
            self._say(f"coordinator: {_listed(names)} can be leased again")

    # ---- watching

    def look(self, progress: Mapping[str, int], now: float) -> None:
        """Is the job stuck? ``progress``: the newest version of each server."""
        missed = [f"{name} is lost" for name in self._gone if name.startswith("server")]
        verdict = self._watchdog.look(Sight(tuple(progress.items()), limit_s=5.0, missed=missed), now)
        hope = "nothing will change that" if verdict.hopeless else "it may come back"
        self._say(f"coordinator: {f'{verdict.stuck} ({hope})' if verdict.stuck else 'the job gets on'}")

    def facts(self) -> dict[str, str]:
        """The state as a newcomer needs it: by name, in words."""
        found = {"timeline": str(self.timeline)}
        for role in (Role.SERVER, Role.WORKER):
            for member in self.members.of(role):
                silent = member.presence is Presence.SILENT
                until = f"silent, its lease ends at {member.expires_at:g} s" if silent else "connected"
                found[member.name] = until
        if self.leases is not None:
            epoch, left = self.leases.position()
            found["slices not done"] = f"epoch {epoch}: {', '.join(f'{lo} to {hi - 1}' for lo, hi in left)}"
            held = sorted((self._who[worker], count) for worker, count in self.leases.holders(epoch).items())
            found["slices leased"] = ", ".join(f"{worker} {count}" for worker, count in held) or "none"
        return found


def _listed(names: Iterable[AsyncName]) -> str:
    return "; ".join(str(name) for name in names)
