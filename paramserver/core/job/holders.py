"""Which server holds which shard of the model. A shard is a part of the model; a server is a process.

The *primary* of a shard is the server that counts contributions to it and answers pulls. A *backup* has the same shard,
and becomes the primary when the primary is gone. A new backup *catches up* first. All changes go through
:meth:`Holders.handle`, which says what follows.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from paramserver.core.job.held import Backup, Held, copies, even, newcomer, primaries, relief, successor
from paramserver.core.job.membership import Member

# A server that is gone may be started again: for so many seconds no other server becomes a backup in its place.
PATIENCE_S = 10.0
# A server is the primary of at most so many shards at the start. With fewer other servers than that, the shards of a
# server that is lost go to all others evenly.
_MOST_SHARDS = 4


class Cover(enum.StrEnum):
    """How well a shard is protected against the loss of a server."""

    REPLICATED = "replicated"
    CATCHING_UP = "catching up"
    NO_BACKUP = "no backup"
    # Neither a primary nor a backup.
    LOST = "lost"


# ---- events


@dataclass(frozen=True, slots=True)
class ServerGone:
    """The server is a member no more. ``present``: the servers that are members."""

    server: int
    present: Collection[int]


@dataclass(frozen=True, slots=True)
class Retires(ServerGone):
    """An operator wants the server to leave: others take over its shards, and it becomes no backup again."""


@dataclass(frozen=True, slots=True)
class Balance:
    """Let a server that is the primary of few shards take one over from a server with more; ``present`` as above."""

    present: Collection[int]


@dataclass(frozen=True, slots=True)
class ServersThere:
    """These servers are members: shards that lack a backup get one, if there is a server for it."""

    present: Collection[int]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A backup has all of its shard. ``since``: as in :class:`Backup`."""

    shard: int
    server: int
    since: int


@dataclass(frozen=True, slots=True)
class Found:
    """A coordinator that takes over has found that this server is the primary of the shard."""

    shard: int
    server: int


@dataclass(frozen=True, slots=True)
class BegunAnew:
    """Another timeline begins. Shards are at their primaries only: the planned ones, or (``stay``) the present ones."""

    stay: bool


Event = ServerGone | Balance | ServersThere | CaughtUp | Found | BegunAnew

# ---- effects


@dataclass(frozen=True, slots=True)
class Promote:
    """The backup ``server`` is the primary of the shard now."""

    shard: int
    server: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The shard has neither a primary nor a backup that could become one."""

    shard: int


Effect = Promote | Lost


class Holders:
    """The placement of one job's shards. ``replicas``: how many backups each shard is to have.

    ``number`` rises with every change.
    """

    def __init__(self, primaries: Sequence[int], replicas: int = 0) -> None:
        self.number = self.promotions = 0
        self.replicas = replicas
        self.shards = tuple(Held(primary) for primary in primaries)
        # How often backups took over from a lost server; how often all shards had all backups again after that.
        self.takeovers = self.repairs = 0
        # A server was lost, and some shard still lacks a backup for that reason.
        self.hurt = False
        # Servers that are about to leave.
        self.retiring: frozenset[int] = frozenset()
        self._planned = tuple(primaries)

    @classmethod
    def plan(cls, servers: int, replicas: int = 0) -> Holders:
        """Shard *i* is on server *i*; with replicas there are several rounds of that, each with other backups."""
        rounds = min(servers - 1, _MOST_SHARDS) if replicas else 1
        return cls([server for _ in range(max(1, rounds)) for server in range(servers)], replicas)

    @classmethod
    def spread(cls, servers: int, former: Holders) -> Holders:
        """The placement for another number of servers, in which each shard has all of its backups.

        Numbers go on from the ``former`` placement.
        """
        made, present = cls.plan(servers, former.replicas), range(servers)
        made.handle(ServersThere(present))
        while late := [(shard, made.shards[shard].backup(server)) for shard, server in made.catching_up(present)]:
            for shard, one in late:
                assert one is not None, "it catches up"
                made.handle(CaughtUp(shard, one.server, one.since))
            made.handle(Balance(present))
        number = former.number + 1
        shards = [
            replace(held, backups=tuple(Backup(one.server, number, whole=True) for one in held.backups))
            for held in made.shards
        ]
        made.restore(number, former.promotions, shards, former.takeovers, former.repairs)
        return made

    # ---- facts

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.shards)

    @property
    def primaries(self) -> tuple[int, ...]:
        """By shard, the index of the server that is its primary."""
        return tuple(held.primary for held in self.shards)

    def shards_of(self, server: int) -> list[int]:
        """The shards of which this server is the primary, in rising order."""
        return [shard for shard, held in enumerate(self.shards) if held.primary == server]

    def places(self, server: Member) -> list[tuple[int, Member]]:
        """The shards of which this server is the primary, each with the server: where commands to them go."""
        return [(shard, server) for shard in self.shards_of(server.index)]

    def copies(self, server: Member) -> list[tuple[int, Member]]:
        """The same for the shards of which this server is the primary or a backup that has all of the shard."""
        return [
            (shard, server)
            for shard, held in enumerate(self.shards)
            if held.primary == server.index or ((backup := held.backup(server.index)) is not None and backup.whole)
        ]

    def catching_up(self, present: Collection[int]) -> list[tuple[int, int]]:
        """(shard, server) of the backups that lack a part of their shard."""
        return [
            (shard, one.server)
            for shard, held in enumerate(self.shards)
            for one in held.backups
            if not one.whole and one.server in present
        ]

    def settled(self, present: Collection[int]) -> bool:
        """Whether all shards have all of their backups, and are spread evenly over the servers that are there."""
        return even(self.shards, present) and all(
            not held.lost and len(held.backups) == self.replicas and all(one.whole for one in held.backups)
            for held in self.shards
        )

    def state(self, shard: int) -> Cover:
        """How well the shard is protected against the loss of a server."""
        held = self.shards[shard]
        if held.lost:
            return Cover.LOST
        if sum(one.whole for one in held.backups) >= self.replicas:
            return Cover.REPLICATED
        return Cover.CATCHING_UP if any(not one.whole for one in held.backups) else Cover.NO_BACKUP

    @property
    def replicated(self) -> bool:
        """Whether each shard has all the backups that it should have."""
        return all(self.state(shard) is Cover.REPLICATED for shard in range(len(self.shards)))

    def covered(self, server: int, present: Collection[int]) -> bool:
        """Whether each shard of this primary has another server that can take its place."""
        return all(
            any(one.whole and one.server in present for one in held.backups)
            for held in self.shards
            if held.primary == server
        )

    # ---- the one door

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in; return what follows."""
        before = self.shards
        match event:
            case Retires(server, present):
                self.retiring |= {server}
                effects = self._gone(server, present)
            case ServerGone(server, present):
                self.retiring -= {server}
                effects = self._gone(server, present)
                promotions = sum(isinstance(effect, Promote) for effect in effects)
                self.promotions += promotions
                self.takeovers += promotions > 0
                self.hurt = self.hurt or (self.replicas > 0 and self.shards != before)
            case Balance(present):
                effects = self._balance(present)
            case ServersThere(present):
                effects = []
                self._fill(present)
            case CaughtUp(shard, server, since):
                effects = []
                self._caught_up(shard, server, since)
            case Found(shard, server):
                effects = []
                if self.shards[shard].primary != server:
                    self._change(shard, primary=server, backups=(), lost=False)
                    self.promotions += 1
                    self.takeovers += before[shard].primary not in self.primaries
            case BegunAnew(stay):
                effects, self.hurt = [], False
                self.shards = tuple(Held(primary) for primary in (self.primaries if stay else self._planned))
                self.number += 1
        self.number += self.shards != before
        if self.hurt and self.replicated:
            self.hurt = False
            self.repairs += 1
        return effects

    def _gone(self, server: int, present: Collection[int]) -> list[Effect]:
        effects: list[Effect] = []
        for shard, held in enumerate(self.shards):
            if held.backup(server) is not None:
                self._change(shard, backups=self._others(shard, server))
            if held.primary != server:
                continue
            following = successor(self.shards, shard, present)
            if following is None:
                self._change(shard, lost=True)
                effects.append(Lost(shard))
                continue
            # Others may have been sent more or less by the former primary: they begin anew.
            others = [one.server for one in held.backups if one.server in present and one.server != following]
            self._change(shard, primary=following, backups=[Backup(one, self.number + 1) for one in others])
            effects.append(Promote(shard, following))
        return effects

    def _caught_up(self, shard: int, server: int, since: int) -> None:
        backup = self.shards[shard].backup(server)
        if backup is None or backup.since != since or backup.whole:  # primaries say so again with each report
            return
        others = self._others(shard, server)
        if len(others) >= self.replicas:  # it takes the place of one on a server that has more copies
            count = copies(self.shards)
            others.remove(max(others, key=lambda one: count[one.server]))
        self._change(shard, backups=[*others, replace(backup, whole=True)])

    def _balance(self, present: Collection[int]) -> list[Effect]:
        """One shard at a time, and only while all copies are whole: a copy that gives way has to catch up again."""
        if any(held.lost or len(held.backups) < self.replicas for held in self.shards):
            return []
        if self.retiring or self.catching_up(present):
            return []
        loads = primaries(self.shards)
        most = max(present, key=lambda server: (loads[server], -server))
        least = min(present, key=lambda server: (loads[server], server))
        if loads[most] - loads[least] >= 2:
            return self._give(most, least)
        if (move := relief(self.shards, present)) is not None:
            self._add_backup(*move)  # in place of one of the others, when it has caught up
        return []

    def _give(self, most: int, least: int) -> list[Effect]:
        """Let server ``least`` take over a shard from ``most``. It needs a copy of one first."""
        mine = [(shard, held) for shard, held in enumerate(self.shards) if held.primary == most]
        for shard, held in mine:
            if held.backup(least) is not None:
                others = [one.server for one in held.backups if one.server != least]
                backups = [Backup(server, self.number + 1) for server in (*others, most)]
                self._change(shard, primary=least, backups=backups)
                return [Promote(shard, least)]
        self._add_backup(mine[0][0], least)
        return []

    def _add_backup(self, shard: int, server: int) -> None:
        self._change(shard, backups=[*self.shards[shard].backups, Backup(server, self.number + 1)])

    def _fill(self, present: Collection[int]) -> None:
        """Find a backup for each shard that lacks one."""
        for shard, held in enumerate(self.shards):
            if held.lost and held.primary in present:  # it has come back with its shard
                self._change(shard, lost=False)
        for shard in range(len(self.shards)):
            held = self.shards[shard]
            while not held.lost and len(held.backups) < self.replicas:
                chosen = newcomer(self.shards, shard, present, self.retiring)
                if chosen is None or held.primary not in present:
                    break
                self._add_backup(shard, chosen)
                held = self.shards[shard]

    def _others(self, shard: int, server: int) -> list[Backup]:
        return [one for one in self.shards[shard].backups if one.server != server]

    def _change(
        self,
        shard: int,
        primary: int | None = None,
        backups: Iterable[Backup] | None = None,
        lost: bool | None = None,
    ) -> None:
        held = self.shards[shard]
        changed = Held(
            held.primary if primary is None else primary,
            held.backups if backups is None else tuple(backups),
            held.lost if lost is None else lost,
        )
        self.shards = (*self.shards[:shard], changed, *self.shards[shard + 1 :])

    # ---- an earlier coordinator

    def restore(
        self,
        number: int,
        promotions: int,
        shards: Sequence[Held],
        takeovers: int = 0,
        repairs: int = 0,
        hurt: bool = False,
    ) -> None:
        """Go on from the record of an earlier coordinator."""
        self.number, self.promotions, self.shards = number, promotions, tuple(shards)
        self.takeovers, self.repairs, self.hurt = takeovers, repairs, hurt
        self._planned = self._planned if len(self._planned) == len(shards) else self.primaries
