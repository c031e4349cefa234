"""The placement of a simulated job's shards: the real state machine decides which server holds which shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paramserver.core.job.holders import (
    PATIENCE_S,
    Balance,
    CaughtUp,
    Event,
    Holders,
    Lost,
    Promote,
    Retires,
    ServerGone,
    ServersThere,
)
from paramserver.errors import ConfigError
from paramserver.simulate.events import Happening, Kind, ServerEvent
from paramserver.simulate.machinery.clock import VirtualClock
from paramserver.simulate.parts.hosts import Program
from paramserver.simulate.servers.shard import Shard

# From the death of a process to the decision of the coordinator, which sees the connection close and gets no answer at
# the address of the process: between the medians of both modes on a busy machine. docs/reliability.md has newer ones.
DETECTION_S = 0.15


class Follower(Protocol):
    """A worker."""

    def moved(self, index: int, shard: Shard) -> None:
        """A shard is at another server now."""


@dataclass(frozen=True, slots=True)
class Means:
    """``program`` starts the process of a server. ``shard`` makes a shard, as in :class:`Shard`.

    ``mbps``: at which a new backup is sent a shard. ``call_s``: of a call from the coordinator. ``lease_s``: of a
    server.
    """

    clock: VirtualClock
    program: Callable[[int], Program]
    shard: Callable[[int, Program, bool | None], Shard]
    mbps: float
    call_s: float
    lease_s: float


class Placement:
    """All copies of all shards. At the beginning all backups are whole."""

    def __init__(self, servers: int, replicas: int, means: Means) -> None:
        self.holders = Holders.plan(servers, replicas)
        self.followers: Sequence[Follower] = ()
        self.happened: list[Happening] = []
        self._means, self._clock = means, means.clock
        self._present = set(range(servers))
        self._programs = [means.program(server) for server in range(servers)]
        self.holders.handle(ServersThere(self._present))
        for index, held in enumerate(self.holders.shards):
            for backup in held.backups:
                self.holders.handle(CaughtUp(index, backup.server, backup.since))
        self._settled = True
        # By shard, its primary; by shard and server, each copy with the number since when it is one.
        self.primaries: list[Shard] = []
        self._copies: dict[tuple[int, int], tuple[int, Shard]] = {}
        for index, held in enumerate(self.holders.shards):
            primary = means.shard(index, self._programs[held.primary], False)
            self.primaries.append(primary)
            self._copies[index, held.primary] = 0, primary
            for backup in held.backups:
                copy = means.shard(index, self._programs[backup.server], True)
                self._copies[index, backup.server] = backup.since, copy
                primary.backups.there(copy)

    def copies(self, index: int) -> list[Shard]:
        """The shard at its primary and at its backups."""
        return [copy for (shard, _), (_, copy) in self._copies.items() if shard == index]

    # ---- servers die, come and leave

    def plan(self, events: Sequence[ServerEvent]) -> None:
        """Let these events happen."""
        for event in events:
            self._clock.at(event.at_s, lambda event=event: self._begin(event))  # type: ignore[misc]

    def _begin(self, event: ServerEvent) -> None:
        server = event.server
        match event.kind:
            case Kind.KILL:
                self._die(server, DETECTION_S, "dies")
            case Kind.CUT:
                self._die(server, self._means.lease_s, "is cut off")
            case Kind.START:
                self._start(server)
            case Kind.DRAIN:
                self._drain(server)

    def _say(self, text: str, event: bool = True) -> None:
        self.happened.append(Happening(self._clock.now, text, event))

    def _die(self, server: int, detection_s: float, what: str) -> None:
        self._say(f"server-{server} {what}")
        dead = self._end(server)

        def detected() -> None:
            if self._programs[server] is dead:
                self._gone(server)

        self._clock.after(detection_s, detected)

    def _end(self, server: int) -> Program:
        """The process ends."""
        program = self._programs[server]
        program.alive = False
        for (_, holder), (_, copy) in self._copies.items():
            if holder == server:
                copy.end()
        return program

    def _gone(self, server: int) -> None:
        if server not in self._present:
            return
        self._present.discard(server)
        self._handle(ServerGone(server, self._present))

        def patience() -> None:
            self._handle(ServersThere(self._present))

        self._clock.after(PATIENCE_S, patience)

    def _start(self, server: int) -> None:
        self._say(f"server-{server} comes")
        self._gone(server)  # the coordinator learns of the loss at the latest now
        self._programs[server] = self._means.program(server)
        self._present.add(server)
        self._handle(ServersThere(self._present))

    def _drain(self, server: int) -> None:
        others = self._present - {server}
        if not self.holders.covered(server, others):
            raise ConfigError(
                f"server-{server} cannot leave {self._clock.now:g} s after the beginning: no other server has a copy "
                "of a part of the model then; let it leave later"
            )
        self._say(f"server-{server} is to leave")
        self._handle(Retires(server, others))

        def leaves() -> None:
            self._end(server)
            self._gone(server)

        self._clock.after(2 * self._means.call_s, leaves)

    # ---- the state machine

    def _handle(self, event: Event) -> None:
        number = self.holders.number
        effects = self.holders.handle(event)
        if any(isinstance(effect, Lost) for effect in effects):
            raise ConfigError(
                f"{self._clock.now:g} s after the beginning a part of the model is on no server any more: the job "
                "would go back to a checkpoint, which is not simulated; let servers die later, or have more replicas"
            )
        if promoted := sum(isinstance(effect, Promote) for effect in effects):
            shards = f"{promoted} shard{'s' if promoted > 1 else ''}"
            from_ = f" of server-{event.server}" if isinstance(event, ServerGone) else ""
            self._say(f"{shards}{from_} to other servers", event=False)
        if self.holders.number != number:
            self._clock.after(self._means.call_s, self._tell)
        settled = self.holders.settled(self._present) and len(self._present) == len(self._programs)
        if settled and not self._settled:
            self._say("all shards have their backups, and are spread evenly", event=False)
        self._settled = settled

    def _caught_up(self, index: int, server: int, since: int) -> None:
        def told() -> None:
            self._handle(CaughtUp(index, server, since))
            self._handle(Balance(self._present))

        self._clock.after(self._means.call_s, told)

    def _tell(self) -> None:
        """Tell servers and workers the newest placement."""
        for index, held in enumerate(self.holders.shards):
            former, (_, primary) = self.primaries[index], self._copies[index, held.primary]
            wanted = {backup.server: backup.since for backup in held.backups}
            for (shard, server), (since, copy) in list(self._copies.items()):
                if shard == index and copy is not primary and wanted.get(server) != since:
                    copy.end()
                    primary.backups.drop(copy)
                    del self._copies[shard, server]
            if primary is not former:
                former.end()
                self.primaries[index] = primary
                primary.promote()
                for follower in self.followers:
                    follower.moved(index, primary)
            for server, since in wanted.items():
                if (index, server) not in self._copies:
                    self._new(index, server, since)

    def _new(self, index: int, server: int, since: int) -> None:
        """A backup begins to catch up."""
        copy = self._means.shard(index, self._programs[server], None)
        self._copies[index, server] = since, copy
        self.primaries[index].backups.begin(copy, self._means.mbps, lambda: self._caught_up(index, server, since))
