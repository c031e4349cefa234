"""Replicated shards: each server is brought to the placement that `Holders` decides, also if servers are slow or die.

A server gets one command at a time, and no server waits for another one. A placement is written down before a server
hears of it, so that another coordinator goes on with it. A backup is ready before its primary hears of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paramserver.core.job import holders as placement
from paramserver.core.job.held import Backup
from paramserver.core.job.holders import PATIENCE_S, BegunAnew, Holders, ServerGone, ServersThere


@dataclass(frozen=True, slots=True)
class Facts:
    """``servers``: the indices of the members that are servers, by their member numbers. ``now``: on any clock.

    ``halted``: the job goes back to a checkpoint or is given up, so that no server is told anything.
    """

    servers: Mapping[int, int]
    now: float
    halted: bool = False


# ---- events; ``server`` is a member number. The events of `Holders` come in here, too.


@dataclass(frozen=True, slots=True)
class Begins:
    """All primaries have published a version: shards get their backups. ``present``: the servers that are members."""

    present: Collection[int]


@dataclass(frozen=True, slots=True)
class Look:
    """Time has passed, or the job goes on. ``present``: the servers that are members."""

    present: Collection[int]


@dataclass(frozen=True, slots=True)
class Done:
    """The server's command has been performed."""

    server: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The server's command has failed. ``fenced``: the server obeys another coordinator, or is on another timeline."""

    server: int
    text: str
    fenced: bool = False


Event = Begins | Look | Done | Failed | placement.Event

# ---- commands


@dataclass(frozen=True, slots=True)
class WriteDown:
    """Wait until the record with this placement is written down."""

    server: int
    number: int


@dataclass(frozen=True, slots=True)
class MakeReady:
    """Make the server a backup of the shard, which it is to catch up with. ``since``: as in `Backup`."""

    server: int
    shard: int
    since: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the server of which shards it is the primary, each with its backups that are ready."""

    server: int
    number: int
    shards: Mapping[int, tuple[Backup, ...]]


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait a moment, since the server has not answered. ``text``: why."""

    server: int
    text: str


@dataclass(frozen=True, slots=True)
class Changed:
    """There is another placement: write it into the record, and tell all members."""


@dataclass(frozen=True, slots=True)
class StepDown:
    """Another coordinator leads the job."""

    reason: str


ToServer = WriteDown | MakeReady | Tell | Rest
Command = ToServer | Changed | StepDown | placement.Effect


@dataclass(slots=True)
class _Server:
    # The newest placement of which the server has heard.
    told: int = -1
    # Whether the server has to hear of the same placement again: a backup was made ready meanwhile.
    outdated: bool = False
    # By shard, since when the server is a backup that is ready; as in `Backup`.
    ready: dict[int, int] = field(default_factory=dict)
    # The command that is being performed; None: the server knows everything, or may not be told.
    command: ToServer | None = None
    # Whether that command belongs to an earlier timeline, so that its end says nothing.
    stale: bool = False


class Placing:
    """The placement of a job's shards, and which server has heard of which placement."""

    def __init__(self, holders: Holders) -> None:
        self.holders = holders
        # Whether shards get backups: all shards are at their primaries, and published.
        self.begun = False
        self._servers: dict[int, _Server] = {}
        # The newest placement that is written down.
        self._written = -1
        # When a server was lost that has not been replaced.
        self._lacks_since: float | None = None

    def handle(self, event: Event, facts: Facts) -> list[Command]:
        """Take an event in; return what follows, in this order."""
        number, commands = self.holders.number, list[Command]()
        self._servers = {ident: self._servers.get(ident, _Server()) for ident in facts.servers}
        match event:
            case Begins(present) if not self.begun:
                self.begun = True
                commands += self.holders.handle(ServersThere(present))
            case Look(present) if self._lacks_since is not None and facts.now - self._lacks_since > PATIENCE_S:
                self._lacks_since = None
                commands += self.holders.handle(ServersThere(present)) if self.begun else ()
            case Begins() | Look():
                pass
            case ServersThere() if not self.begun:
                pass
            case Done(ident) | Failed(ident):
                commands += self._ended(ident, event, facts)
            case _:
                if type(event) is ServerGone:
                    self._lacks_since = facts.now
                commands += self.holders.handle(event)
        if self.holders.number != number:
            commands.append(Changed())
        stops = any(isinstance(command, StepDown) for command in commands)
        return commands if stops else commands + self._wake(facts)

    def _ended(self, ident: int, event: Done | Failed, facts: Facts) -> list[Command]:
        server = self._servers.get(ident)
        if server is None or server.command is None:  # the server is a member no more
            return []
        command, server.command = server.command, None
        stale, server.stale = server.stale, False
        if stale:
            return []
        if isinstance(event, Failed):
            server.outdated = True
            if not event.fenced:
                server.command = Rest(ident, event.text)
                return [server.command]
            return [StepDown(event.text)] if self._lacks(ident, facts) else []
        match command:
            case WriteDown(number=number):
                self._written = max(self._written, number)
            case MakeReady(shard=shard, since=since):
                server.ready[shard] = since
                primary = self.holders.shards[shard].primary  # it may bring the shard now
                for other in [other for other, index in facts.servers.items() if index == primary]:
                    self._servers[other].outdated = True
            case Tell(number=number):
                server.told = number
        return []

    def _wake(self, facts: Facts) -> list[Command]:
        """The next commands for all servers to which nothing is said just now."""
        commands = list[Command]()
        for ident in facts.servers:
            server = self._servers[ident]
            if server.command is None and self._lacks(ident, facts):
                server.command = self._next(ident, facts)
                commands.append(server.command)
        return commands

    def _lacks(self, ident: int, facts: Facts) -> bool:
        """Whether this server has still to hear of the present placement."""
        server = self._servers[ident]
        may = self.begun and self.holders.replicas > 0 and not facts.halted
        return may and (server.outdated or server.told != self.holders.number)

    def _next(self, ident: int, facts: Facts) -> ToServer:
        server, index = self._servers[ident], facts.servers[ident]
        if self._written < self.holders.number:
            return WriteDown(ident, self.holders.number)
        for shard, held in enumerate(self.holders.shards):
            backup = held.backup(index)
            if backup is not None and not backup.whole and server.ready.get(shard) != backup.since:
                return MakeReady(ident, shard, backup.since)
        server.outdated = False
        return self.tell(ident, facts)

    def tell(self, ident: int, facts: Facts) -> Tell:
        """The message to this server about the present placement."""
        ready = {
            (shard, facts.servers[other], since)
            for other, server in self._servers.items()
            for shard, since in server.ready.items()
            if other in facts.servers
        }
        shards = {
            shard: tuple(
                one
                for one in self.holders.shards[shard].backups
                if one.whole or (shard, one.server, one.since) in ready
            )
            for shard in self.holders.shards_of(facts.servers[ident])
        }
        return Tell(ident, self.holders.number, shards)

    def heard(self, ident: int) -> int:
        """The newest placement of which this server has heard; -1: of none."""
        return self._servers[ident].told if ident in self._servers else -1

    # ---- timelines

    def pause(self, stay: bool) -> None:
        """Another timeline begins, and no backup counts. ``stay``: primaries stay where they are."""
        self.begun = False
        self._forget()
        self.holders.handle(BegunAnew(stay))

    def adopt(self, holders: Holders, servers: Collection[int]) -> None:
        """Another placement is in force, with all backups. The ``servers`` (member numbers) know."""
        self.holders, self._lacks_since = holders, None
        self._forget()
        for ident in servers:
            self._servers.setdefault(ident, _Server()).told = holders.number

    def _forget(self) -> None:
        self._servers = {
            ident: _Server(command=server.command, stale=True)
            for ident, server in self._servers.items()
            if server.command is not None
        }
